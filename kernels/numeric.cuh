// f32 arithmetic with every rounding written out, so that a kernel computes the bits that the CPU does, and f16 and bf16
// values as the reference (`src/quant/half16.rs`) makes them.
#pragma once
#include <stdint.h>

namespace qkv {

// Sums, products and quotients rounded half to even. nvcc never fuses these, whatever its flags.
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float quotient(float a, float b) { return __fdiv_rn(a, b); }

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float from_bits(uint32_t b) { return __uint_as_float(b); }

constexpr float kInfinity = __builtin_huge_valf();

// The largest magnitude that is fitted: the largest finite f16.
constexpr float kLimit = 65504.0f;

// 1.5 * 2^23: adding and subtracting it rounds |t| < 2^22 to an integer, half to even.
constexpr float kMagic = 12582912.0f;

// Value of f16 bits.
__device__ __forceinline__ float half_to_float(uint16_t h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

// Nearest f16, half to even, as bits.
__device__ __forceinline__ uint16_t float_to_half(float f) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

// The same with NaN as the CPU has it: quiet, sign and upper payload kept. For rows and pages that hold f16 as such; PTX leaves
// the payload open.
__device__ __forceinline__ float half_to_float_nan(uint16_t h) {
  uint32_t nan = (uint32_t)(h & 0x8000) << 16 | 0x7fc00000 | (uint32_t)(h & 0x3ff) << 13;
  return (h & 0x7fff) > 0x7c00 ? from_bits(nan) : half_to_float(h);
}

__device__ __forceinline__ uint16_t float_to_half_nan(float f) {
  uint32_t b = bits_of(f);
  uint16_t nan = (uint16_t)(b >> 16 & 0x8000) | 0x7e00 | (uint16_t)(b >> 13 & 0x3ff);
  return (b & 0x7fffffff) > 0x7f800000 ? nan : float_to_half(f);
}

// The nearest f16 value as f32. |x| <= 65504.
__device__ __forceinline__ float round_half(float x) { return half_to_float(float_to_half(x)); }

// Bits of the largest f16 that is not above x, |x| <= 65504.
__device__ __forceinline__ uint16_t half_down(float x) {
  uint16_t h = float_to_half(x);
  if (half_to_float(h) <= x) return h;
  if ((h & 0x7fff) == 0) return 0x8001;
  return h & 0x8000 ? h + 1 : h - 1;
}

// Bits of the smallest f16 that is not below x >= 0, at most 65504.
__device__ __forceinline__ uint16_t half_up(float x) {
  if (x >= kLimit) return 0x7bff;
  uint16_t h = float_to_half(x);
  return h + (half_to_float(h) < x ? 1 : 0);
}

// Value of bf16 bits, and the nearest bf16 as bits: half to even, NaN stays a quiet NaN.
__device__ __forceinline__ float bfloat_to_float(uint16_t b) { return from_bits((uint32_t)b << 16); }

__device__ __forceinline__ uint16_t float_to_bfloat(float f) {
  uint32_t b = bits_of(f);
  if ((b & 0x7fffffff) > 0x7f800000) return (b >> 16) | 0x40;
  return (b + 0x7fff + ((b >> 16) & 1)) >> 16;
}

}  // namespace qkv
