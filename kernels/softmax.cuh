// What decode and prefill attention share of the softmax: logits are kept in log2 units.
#pragma once
#include "ptx.cuh"

namespace qkv {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// cap * tanh(x / cap); x and result in log2 units, `cap` in natural ones. NaN stays NaN.
__device__ __forceinline__ float soft_cap(float x, float cap) {
  // tanh y = 1 - 2 / (e^2y + 1)
  const float e = exp2_fast(fminf(x * (2 / cap), 126.0f));
  const float y = 1 - 2 * reciprocal_fast(e + 1);
  return x == x ? cap * kLog2e * y : x;
}

}  // namespace qkv
