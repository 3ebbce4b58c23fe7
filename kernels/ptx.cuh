// The only inline PTX beside the f16 conversions of numeric.cuh.
#pragma once
#include <stdint.h>

namespace qkv {

#if __CUDA_ARCH__ >= 890
// Two FP8 bytes of two f32, the first in the low byte: half to even, saturating, NaN becomes 0x7f.
__device__ __forceinline__ uint16_t cvt_e4m3x2(float low, float high) {
  uint16_t d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ uint16_t cvt_e5m2x2(float low, float high) {
  uint16_t d;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}

// Two f16 of two FP8 bytes: exact.
__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2(uint16_t bytes) {
  uint32_t d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(bytes));
  return d;
}

__device__ __forceinline__ uint32_t cvt_f16x2_e5m2x2(uint16_t bytes) {
  uint32_t d;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(d) : "h"(bytes));
  return d;
}
#endif

}  // namespace qkv
