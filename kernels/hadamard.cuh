// Block Hadamard rotation of one block held by a warp: the twin of `src/quant/hadamard.rs`. The butterflies run with strides
// block / 2 ... 1, then one product with 1 / sqrt(block) rounded to f32; that order is part of the format.
#pragma once
#include "numeric.cuh"

namespace qkv {

// 1 / sqrt(block) as the CPU computes it: the root rounded, then the quotient.
template <int Block>
__device__ __forceinline__ float hadamard_factor() {
  return quotient(1.0f, __fsqrt_rn((float)Block));
}

// Rotates a block of 32 R channels; lane l holds channel r * 32 + l in x[r].
template <int R>
__device__ __forceinline__ void hadamard(float (&x)[R], uint32_t lane) {
#pragma unroll
  for (int s = R / 2; s > 0; s /= 2) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      if ((r & s) == 0) {
        float a = x[r], b = x[r + s];
        x[r] = add(a, b);
        x[r + s] = sub(a, b);
      }
    }
  }
#pragma unroll
  for (int s = 16; s > 0; s /= 2) {
#pragma unroll
    for (int r = 0; r < R; r++) {
      float other = __shfl_xor_sync(0xffffffff, x[r], s);
      x[r] = lane & s ? sub(other, x[r]) : add(x[r], other);
    }
  }
#pragma unroll
  for (int r = 0; r < R; r++) x[r] = mul(x[r], hadamard_factor<32 * R>());
}

}  // namespace qkv
