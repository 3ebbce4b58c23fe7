// Where every bit of a page lies: the twin of `src/layout/order.rs`, which explains both orders. These functions tell the place
// of one element; `pack.cuh` moves whole tiles by the same rules.
#pragma once
#include "abi.h"
#include "numeric.cuh"

namespace qkv {

// A byte of a section, and a bit of it.
struct Place {
  uint32_t byte;
  uint32_t bit;
};

// Whether elements are stored as 16-bit floats.
__host__ __device__ constexpr bool is_half(uint32_t kind) { return kind == QKV_KIND_F16 || kind == QKV_KIND_BF16; }

__device__ __forceinline__ uint32_t code_bits(const QkvFormat& f) {
  if (f.kind == QKV_KIND_AFFINE) return f.bits;
  return is_half(f.kind) ? 16 : 8;
}

// 32-bit words of a lane in an operand's codes section, in fragment order.
__device__ __forceinline__ uint32_t lane_words(const QkvOperand& at) { return at.code_bytes / 128; }

// First byte of a lane's word, of `words` a lane: whole vectors lane after lane, then rows of single words.
__device__ __forceinline__ uint32_t word_byte(uint32_t words, uint32_t lane, uint32_t word) {
  uint32_t vectors = words / 4;
  if (word < 4 * vectors) return word / 4 * 512 + lane * 16 + word % 4 * 4;
  return vectors * 512 + (word - 4 * vectors) * 128 + lane * 4;
}

// Bit `bit` of the code of (token, channel) in the codes section.
__device__ __forceinline__ Place code_bit(const QkvFormat& f, const QkvOperand& at, uint32_t order, uint32_t token,
                                          uint32_t channel, uint32_t bit) {
  uint32_t bits = code_bits(f);
  if (order == QKV_ORDER_ROW) {
    uint32_t stream = channel * bits + bit;
    return {token * at.row_bytes + stream / 8, stream % 8};
  }
  uint32_t row = at.value ? channel : token, column = at.value ? token : channel;
  uint32_t nb = (at.value ? QKV_TILE : at.dim) / 16;
  uint32_t mt = row / 16, half = row / 8 % 2, g = row % 8;
  uint32_t kb = column / 16, x = column % 16, t = x / 2 % 4;
  // Which of the lane's four columns: 2t, 2t+8, 2t+1, 2t+9.
  uint32_t b = x % 2 * 2 + x / 8;
  uint32_t f8 = 2 * (mt % 4) + half;
  uint32_t word, place;
  if (bits == 16) {
    word = 4 * (mt * nb + kb) + 2 * (x / 8) + half;
    place = 16 * (x % 2) + bit;
  } else if (f.kind != QKV_KIND_AFFINE) {
    // The conversion instructions want neighbouring columns in neighbouring bytes.
    word = 2 * (mt * nb + kb) + half;
    place = 8 * (x % 2 + x / 8 * 2) + bit;
  } else if (bits == 8) {
    word = 2 * (mt * nb + kb) + half;
    place = 8 * b + bit;
  } else if (bits == 4) {
    word = mt * nb + kb;
    place = 8 * b + 4 * half + bit;
  } else if (bits == 2) {
    word = mt / 2 * nb + kb;
    place = 8 * b + 2 * (f8 % 4) + bit;
  } else if (bits == 1) {
    word = mt / 4 * nb + kb;
    place = 8 * b + f8;
  } else {
    uint32_t w = 3 * (mt / 4 * nb + kb);
    if (f8 < 6) {
      word = w + f8 / 2;
      place = 8 * b + 3 * (f8 % 2) + bit;
    } else if (bit == 0) {
      word = w + 2;
      place = 8 * b + f8;
    } else {
      word = w + f8 - 6;
      place = 8 * b + 6 + bit - 1;
    }
  }
  return {word_byte(lane_words(at), 4 * g + t, word) + place / 8, place % 8};
}

// First bytes of the two 16-bit halves of the pair (or FP8 scale) of (token, channel) in the pairs section. False if there is
// none.
__device__ __forceinline__ bool pair_bytes(const QkvFormat& f, const QkvOperand& at, uint32_t order, uint32_t token,
                                           uint32_t channel, uint32_t& low, uint32_t& high) {
  if (at.pair_count == 0) return false;
  uint32_t d = at.dim, group = f.kind == QKV_KIND_AFFINE ? f.group : d;
  uint32_t groups = (d + group - 1) / group, index;
  if (f.kind != QKV_KIND_AFFINE || !f.per_channel) {
    index = token * groups + channel / group;
    // Tokens 8 apart side by side: what one lane's accumulator rows need.
    if (order == QKV_ORDER_FRAGMENT) index = (token % 8 * groups + channel / group) * 8 + token / 8;
  } else if (order == QKV_ORDER_ROW) {
    index = token / group * d + channel;
  } else if (at.value) {
    index = token / group * d + channel % 8 * (d / 8) + channel / 8;
  } else {
    // Steps, then mins; a lane's channels side by side.
    uint32_t x = channel % 16, first = token / group * 4 * d;
    uint32_t element = x / 2 % 4 * (d / 4) + channel / 16 * 4 + x / 8 * 2 + x % 2;
    low = first + 2 * element;
    high = first + 2 * (d + element);
    return true;
  }
  low = 4 * index;
  high = low + 2;
  return true;
}

}  // namespace qkv
