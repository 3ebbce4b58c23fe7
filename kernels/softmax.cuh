// What decode and prefill attention share: powers of two, and the softmax, whose logits are kept in log2 units.
#pragma once
#include "numeric.cuh"
#include "ptx.cuh"

namespace qkv {

// 2^e, at least 2^-126. By its bits: a loop of products, as one would write it for a constant, stays a loop in the kernel.
__device__ __forceinline__ float power_of_two(int32_t e) { return from_bits((uint32_t)(min(max(e, -126), 127) + 127) << 23); }

// 1 / x of a power of two between 2^-126 and 2^126.
__device__ __forceinline__ float inverse_power(float x) { return from_bits(0x7f000000 - bits_of(x)); }

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// cap * tanh(x / cap); x and result in log2 units, `cap` in natural ones. NaN stays NaN.
__device__ __forceinline__ float soft_cap(float x, float cap) {
  // tanh y = 1 - 2 / (e^2y + 1)
  const float e = exp2_fast(fminf(x * (2 / cap), 126.0f));
  const float y = 1 - 2 * reciprocal_fast(e + 1);
  return x == x ? cap * kLog2e * y : x;
}

}  // namespace qkv
