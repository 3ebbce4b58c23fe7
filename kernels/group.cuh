// A group of affine codes in the registers of a few lanes: the twin of `src/quant/affine.rs`.
//
// A group is padded to P = 32, 64, 128 or 256 elements (512: a whole head of a cache). L = P / R lanes hold it, R registers
// each: lane l has elements r * L + l. So the sums' strides of L and more are between registers, the smaller ones between lanes,
// and 32 / L groups share a warp. A butterfly over lanes is the CPU's tree: a + b is b + a, and every lane gets the sum.
//
// A lane may hold its elements at register r ^ key instead of r: the tree only sees another order of its two operands. That
// frees reads of shared memory from bank conflicts (`encode.cuh`).
#pragma once
#include "abi.h"
#include "numeric.cuh"

namespace qkv {

constexpr uint32_t kAll = 0xffffffff;
// step and min are f16 NaN.
constexpr uint32_t kNanPair = 0x7e007e00;

// Elements that a group of `n` is padded to.
__device__ __forceinline__ uint32_t padded(uint32_t n) {
  return n <= 32 ? 32 : n <= 64 ? 64 : n <= 128 ? 128 : n <= 256 ? 256 : 512;
}

template <int R>
struct Group {
  float x[R];
  // Bit r: x[r] counts. Others are 0.
  uint32_t live;
  // Lanes of the group, a power of two; neighbours that begin at a multiple of it.
  uint32_t lanes;
  // Elements that count.
  uint32_t count;
  float lo, hi;

  __device__ __forceinline__ bool counts(int r) const { return live >> r & 1; }
};

// The levels of the tree between registers. A template, as nvcc gives up unrolling such a loop over 16.
template <int S, int R>
__device__ __forceinline__ void fold(float (&t)[R]) {
#pragma unroll
  for (int r = 0; r < S; r++) t[r] = add(t[r], t[r + S]);
  if constexpr (S > 1) fold<S / 2>(t);
}

// The sum over the group of the terms that count, in the CPU's order. Clobbers t. All lanes of the warp take part.
template <int R>
__device__ __forceinline__ float group_sum(const Group<R>& g, float (&t)[R]) {
#pragma unroll
  for (int r = 0; r < R; r++) t[r] = g.counts(r) ? t[r] : 0.0f;
  fold<R / 2>(t);
  float sum = t[0];
#pragma unroll 1
  for (uint32_t s = g.lanes / 2; s > 0; s /= 2) sum = add(sum, __shfl_xor_sync(kAll, sum, s));
  return sum;
}

// What a code divides by: a step of 0 makes every code 0.
__device__ __forceinline__ float divisor(float step) { return step == 0.0f ? kInfinity : step; }

// Clamps to 0..max; NaN becomes 0.
__device__ __forceinline__ float clamp_code(float t, float max) {
  t = t > 0.0f ? t : 0.0f;
  return t < max ? t : max;
}

// Clamps and rounds half to even.
__device__ __forceinline__ float round_code(float t, float max) { return sub(add(clamp_code(t, max), kMagic), kMagic); }

// The same as an integer.
__device__ __forceinline__ uint32_t code_of(float x, float div, float min, float max) {
  return bits_of(add(clamp_code(quotient(sub(x, min), div), max), kMagic)) & 0xff;
}

__device__ __forceinline__ uint32_t pair_word(uint16_t step, uint16_t min) { return step | (uint32_t)min << 16; }

// The pair of a range: min rounded down, step rounded up.
__device__ __forceinline__ uint32_t min_max(float lo, float hi, float max) {
  uint16_t min = half_down(lo);
  return pair_word(half_up(quotient(sub(hi, half_to_float(min)), max)), min);
}

// Clamps to the range of f16 and finds lo and hi. False: the pair needs no fit and all codes are 0. `clamped` grows by the
// elements of this lane that were clamped.
template <int R>
__device__ __forceinline__ bool prepare(Group<R>& g, uint32_t& pair, uint32_t& clamped) {
  float lo = kInfinity, hi = -kInfinity;
  uint32_t top = 0;
#pragma unroll
  for (int r = 0; r < R; r++) {
    if (g.counts(r)) {
      // NaN is left out here and shows in `top`.
      lo = fminf(lo, g.x[r]);
      hi = fmaxf(hi, g.x[r]);
      top = max(top, bits_of(g.x[r]) & 0x7fffffff);
    }
  }
#pragma unroll 1
  for (uint32_t s = g.lanes / 2; s > 0; s /= 2) {
    lo = fminf(lo, __shfl_xor_sync(kAll, lo, s));
    hi = fmaxf(hi, __shfl_xor_sync(kAll, hi, s));
    top = max(top, __shfl_xor_sync(kAll, top, s));
  }
  if (g.count == 0) {
    pair = 0;
    return false;
  }
  if (top >= bits_of(kInfinity)) {
    pair = kNanPair;
    return false;
  }
  if (top > bits_of(kLimit)) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      clamped += bits_of(fabsf(g.x[r])) > bits_of(kLimit);
      g.x[r] = fminf(fmaxf(g.x[r], -kLimit), kLimit);
    }
    lo = fminf(fmaxf(lo, -kLimit), kLimit);
    hi = fminf(fmaxf(hi, -kLimit), kLimit);
  }
  // -0 becomes 0: which of two zeros is the smaller must not depend on the order of the search.
  g.lo = add(lo, 0.0f);
  g.hi = add(hi, 0.0f);
  if (lo == hi) {
    pair = pair_word(0, float_to_half(g.lo));
    return false;
  }
  return true;
}

}  // namespace qkv
