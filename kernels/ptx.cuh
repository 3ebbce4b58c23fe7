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

// d += a b on tensor cores. Lane 4g + t holds rows g, g + 8 of a and d (register i: row g + 8 (i mod 2) of a) and column g of b.

// f16, 16 x 8 x 16: a[i] columns 2t + 8 (i / 2) and the next; b[i] rows 2t + 8i and the next; d[i] row g + 8 (i / 2), column
// 2t + i mod 2.
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 8-bit, 16 x 8 x 32: a[i] columns 4t + 16 (i / 2) .. + 3; b[i] rows 4t + 16i .. + 3.
__device__ __forceinline__ void mma_u8_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_u8_u8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace qkv
