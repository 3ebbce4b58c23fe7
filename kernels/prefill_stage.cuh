// Tiles of 64 tokens in shared memory as f16, for prefill: the operands of the tensor cores.
//
// Keys lie [token][channel] with 16 bytes behind each row, so that the eight rows of a matrix begin in different banks. Values of
// pages lie transposed, [channel][token], 128 bytes a row with the 16-byte vectors of row c exchanged by c mod 8: words of
// fragment order hold two neighbouring tokens of a channel, which go out in one store. Values of rows lie as keys do, and
// `ldmatrix` transposes them.
//
// Not all values fit f16, so a tile has a factor: the value is factor * (what lies in shared memory).
//   affine codes    step * code + min in f16 arithmetic, rounded once: factor 1. Pairs whose largest value is beyond f16 (they
//                   come from values clamped to its largest number) take a slow way, factor 512.
//   FP8             the bytes themselves, which f16 holds: the static scale is the factor. A scale a token is multiplied in.
//   bf16            numbers of 8 bits times a power of two fit the 11 bits of f16 over 29 binades at least, so bf16 tiles run
//                   through the same f16 instructions, with no more error than f32 sums have: hi and lo parts by bf16
//                   instructions would cost twice the matrix products. The power follows the tile's largest element, lazily.
#pragma once
#include "exact.cuh"
#include "fp8.cuh"
#include "layout.cuh"
#include "softmax.cuh"

namespace qkv {

// Bytes of a token's row, or of a page's channel.
template <int D>
constexpr uint32_t kRowBytes = 2 * (D + 8);
constexpr uint32_t kChannelBytes = 2 * QKV_TILE;

// Two bytes of each half have all exponent bits set: infinity or NaN.
__device__ __forceinline__ uint32_t not_finite(uint32_t halves) { return ((halves & 0x7c007c00) + 0x04000400) & 0x80008000; }

// One operand and kv head of a sequence, and where its tile lies.
struct Staged {
  const QkvFormat& f;
  const QkvOperand& at;
  uint8_t* tile;
  // Where that is in shared memory.
  uint32_t address, row_bytes;
  // A number a warp in shared memory, `scratch_stride` apart, for a maximum over the block.
  float* scratch;
  uint32_t scratch_stride;
  // The power of two of the last tile that had one.
  int32_t unit;
  // Static FP8 scale.
  float scale;
  // Group of an element: its number shifted by this. Groups that are no power of two are whole heads.
  uint32_t group_shift;
  float factor;
};

// Where channel c of token t lies.
template <bool Value>
__device__ __forceinline__ uint8_t* element(const Staged& s, uint32_t row, uint32_t column) {
  if (!Value) return s.tile + row * s.row_bytes + 2 * column;
  return s.tile + row * kChannelBytes + ((column >> 3 ^ (row & 7)) << 4) + 2 * (column & 7);
}

// The largest of the block's numbers >= 0; a barrier stands inside.
__device__ __forceinline__ float block_max(const Staged& s, float x) {
  float m = from_bits(__reduce_max_sync(0xffffffff, bits_of(x)));
  if (threadIdx.x % 32 == 0) s.scratch[threadIdx.x / 32 * s.scratch_stride] = m;
  __syncthreads();
  m = s.scratch[0];
  for (uint32_t i = 1; i < blockDim.x / 32; i++) m = fmaxf(m, s.scratch[i * s.scratch_stride]);
  return m;
}

// Sets the tile's power of two for values up to `bound` (finite): it stays where bound is 2^-2 to 2^15 of it.
__device__ __forceinline__ void choose_unit(Staged& s, float bound) {
  const int32_t e = (int32_t)(bits_of(bound) >> 23) - 126;
  if (bound > 0.0f && (e - s.unit > 15 || e - s.unit < -2)) s.unit = min(max(e - 10, -100), 113);
}

// Two bf16 as f32.
__device__ __forceinline__ float2 bfloats(uint32_t w) { return make_float2(from_bits(w << 16), from_bits(w & 0xffff0000)); }

// The larger of two magnitudes, infinity and NaN left out.
__device__ __forceinline__ float larger(float m, float x) {
  x = fabsf(x);
  return x < kInfinity ? fmaxf(m, x) : m;
}

}  // namespace qkv
