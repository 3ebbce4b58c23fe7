// Single tokens into a page in fragment order (direct mode): codes and pairs of one row of shared memory to the token's own bits.
//
// A byte of values belongs to one token, and so does a whole word of 8-bit keys. Narrower keys share their words with tokens 8 apart,
// which other blocks may be writing: the token's bits are cleared, then set, by atomics that touch no others.
#pragma once
#include "layout.cuh"

namespace qkv {

__device__ __forceinline__ void put_bits(uint32_t* word, uint32_t mask, uint32_t value) {
  atomicAnd(word, ~mask);
  if (value) atomicOr(word, value);
}

// Row of the matrix [row][column] in fragment order.
struct FragmentRow {
  uint32_t mt, half, g, f;
  __device__ FragmentRow(uint32_t row) : mt(row / 16), half(row / 8 % 2), g(row % 8), f(2 * (row / 16 % 4) + row / 8 % 2) {}
};

// Keys: four codes of a token are one word's columns 2t, 2t+8, 2t+1, 2t+9 (FP8: 2t, 2t+1, 2t+8, 2t+9). Threads have (block of 16
// columns, t).
__device__ __forceinline__ void scatter_key(const QkvFormat& f, const QkvOperand& at, uint32_t token, const uint8_t* row,
                                            uint8_t* section, uint32_t thread, uint32_t threads) {
  FragmentRow r(token);
  uint32_t nb = at.dim / 16, words = lane_words(at), bits = code_bits(f);
  for (uint32_t i = thread; i < at.dim / 4; i += threads) {
    uint32_t kb = i / 4, t = i % 4, lane = 4 * r.g + t, c = 16 * kb + 2 * t;
    auto word = [&](uint32_t w) { return (uint32_t*)(section + word_byte(words, lane, w)); };
    if (bits == 16) {
      const uint16_t* x = (const uint16_t*)row;
      uint32_t w = 4 * (r.mt * nb + kb) + r.half;
      *word(w) = x[c] | (uint32_t)x[c + 1] << 16;
      *word(w + 2) = x[c + 8] | (uint32_t)x[c + 9] << 16;
      continue;
    }
    bool neighbours = f.kind != QKV_KIND_AFFINE;
    uint32_t q = row[c] | (uint32_t)row[neighbours ? c + 1 : c + 8] << 8 | (uint32_t)row[neighbours ? c + 8 : c + 1] << 16 |
                 (uint32_t)row[c + 9] << 24;
    if (bits == 8) {
      *word(2 * (r.mt * nb + kb) + r.half) = q;
    } else if (bits == 4) {
      put_bits(word(r.mt * nb + kb), 0x0f0f0f0f << (4 * r.half), q << (4 * r.half));
    } else if (bits == 2) {
      put_bits(word(r.mt / 2 * nb + kb), 0x03030303 << (2 * (r.f % 4)), q << (2 * (r.f % 4)));
    } else if (bits == 1) {
      put_bits(word(r.mt / 4 * nb + kb), 0x01010101 << r.f, q << r.f);
    } else if (r.f < 6) {
      put_bits(word(3 * (r.mt / 4 * nb + kb) + r.f / 2), 0x07070707 << (3 * (r.f % 2)), q << (3 * (r.f % 2)));
    } else {
      uint32_t w = 3 * (r.mt / 4 * nb + kb);
      put_bits(word(w + r.f - 6), 0xc0c0c0c0, (q & 0x06060606) << 5);
      put_bits(word(w + 2), 0x01010101 << r.f, (q & 0x01010101) << r.f);
    }
  }
}

// Values: a byte (16-bit formats: half a word) of one token holds 1 to 8 channels that are 8 apart. Threads have (group of such
// channels, g).
__device__ __forceinline__ void scatter_value(const QkvFormat& f, const QkvOperand& at, uint32_t token, const uint8_t* row,
                                              uint8_t* section, uint32_t thread, uint32_t threads) {
  uint32_t words = lane_words(at), bits = code_bits(f);
  uint32_t kb = token / 16, x = token % 16, t = x / 2 % 4;
  uint32_t b = f.kind == QKV_KIND_AFFINE ? x % 2 * 2 + x / 8 : x % 2 + x / 8 * 2;
  constexpr uint32_t nb = QKV_TILE / 16;
  // Rows that share a byte, as groups of 8.
  uint32_t groups = bits >= 8 ? 1 : bits == 3 ? 8 : 8 / bits;
  uint32_t count = (at.dim + 8 * groups - 1) / (8 * groups) * 8;
  for (uint32_t i = thread; i < count; i += threads) {
    uint32_t m = i / 8, g = i % 8, lane = 4 * g + t, first = 8 * groups * m + g;
    auto byte = [&](uint32_t w) { return section + word_byte(words, lane, w) + b; };
    if (bits == 16) {
      uint32_t w = 4 * (m / 2 * nb + kb) + 2 * (x / 8) + m % 2;
      *(uint16_t*)(section + word_byte(words, lane, w) + 2 * (x % 2)) = ((const uint16_t*)row)[first];
    } else if (bits == 8) {
      *byte(2 * (m / 2 * nb + kb) + m % 2) = row[first];
    } else if (bits == 3) {
      uint32_t w[3] = {0, 0, 0};
      for (uint32_t k = 0; k < 8; k++) {
        uint32_t q = first + 8 * k < at.dim ? row[first + 8 * k] : 0;
        if (k < 6) {
          w[0] |= k / 2 == 0 ? q << (3 * (k % 2)) : 0;
          w[1] |= k / 2 == 1 ? q << (3 * (k % 2)) : 0;
          w[2] |= k / 2 == 2 ? q << (3 * (k % 2)) : 0;
        } else {
          w[0] |= k == 6 ? (q & 6) << 5 : 0;
          w[1] |= k == 7 ? (q & 6) << 5 : 0;
          w[2] |= (q & 1) << k;
        }
      }
#pragma unroll
      for (uint32_t k = 0; k < 3; k++) *byte(3 * (m * nb + kb) + k) = (uint8_t)w[k];
    } else {
      uint32_t q = 0;
      for (uint32_t k = 0; k < groups; k++) {
        if (first + 8 * k < at.dim) q |= (uint32_t)row[first + 8 * k] << (bits * k);
      }
      *byte(m * nb + kb) = (uint8_t)q;
    }
  }
}

// One token's row of codes and its pairs (or f32 scale) into an operand of a page. Per-token formats only.
__device__ __forceinline__ void scatter_token(const QkvFormat& f, const QkvOperand& at, uint32_t token, const uint8_t* codes,
                                              const uint32_t* pairs, uint8_t* page, uint32_t thread, uint32_t threads) {
  uint8_t* section = page + at.codes;
  if (at.value) {
    scatter_value(f, at, token, codes, section, thread, threads);
  } else {
    scatter_key(f, at, token, codes, section, thread, threads);
  }
  uint32_t groups = at.pair_count / QKV_TILE;
  for (uint32_t j = thread; j < groups; j += threads) {
    ((uint32_t*)(page + at.pairs))[(token % 8 * groups + j) * 8 + token / 8] = pairs[j];
  }
}

}  // namespace qkv
