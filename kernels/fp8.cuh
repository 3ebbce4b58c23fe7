// FP8 bytes of f32 values and back: OCP E4M3FN and E5M2, the twin of `src/quant/fp8.rs`. Half to even, saturating: overflow and
// infinity become the largest finite value, NaN becomes 0x7f. sm_89 and later have instructions for it; below, integers do the
// same.
#pragma once
#include "abi.h"
#include "numeric.cuh"
#include "ptx.cuh"

namespace qkv {

// The largest finite value.
__device__ __forceinline__ float fp8_max(uint32_t kind) { return kind == QKV_KIND_E5M2 ? 57344.0f : 448.0f; }

__device__ __forceinline__ uint32_t fp8_encode_integer(bool e5m2, float v) {
  uint32_t shift = e5m2 ? 21 : 20, bias = e5m2 ? 15 : 7;
  // Adding this makes the last place of the sum the smallest subnormal: 2^-9 (E4M3), 2^-16 (E5M2).
  float magic = e5m2 ? 128.0f : 16384.0f, max = e5m2 ? 57344.0f : 448.0f;
  uint32_t bits = bits_of(v);
  float a = fabsf(v);
  a = a > max ? max : a;
  uint32_t b = bits_of(a);
  uint32_t normal = ((b + (1u << (shift - 1)) - 1 + ((b >> shift) & 1)) >> shift) - ((127 - bias) << (23 - shift));
  uint32_t subnormal = bits_of(add(a, magic)) - bits_of(magic);
  uint32_t code = a < from_bits((128 - bias) << 23) ? subnormal : normal;
  code = (code & 0x7f) | (bits >> 24 & 0x80);
  return v != v ? 0x7f : code;
}

__device__ __forceinline__ float fp8_decode_integer(bool e5m2, uint32_t byte) {
  uint32_t shift = e5m2 ? 21 : 20, bias = e5m2 ? 15 : 7, a = byte & 0x7f;
  float smallest = from_bits((128 - bias - (23 - shift)) << 23);
  float x = a < (1u << (23 - shift)) ? mul((float)a, smallest) : from_bits((a << shift) + ((127 - bias) << 23));
  if (e5m2 && a >= 0x7c) x = a == 0x7c ? kInfinity : from_bits(0x7fc00000);
  if (!e5m2 && a == 0x7f) x = from_bits(0x7fc00000);
  return from_bits(bits_of(x) | (byte & 0x80) << 24);
}

// Four bytes of four quotients, the first in the low byte.
__device__ __forceinline__ uint32_t fp8_encode4(uint32_t kind, const float* v) {
#if __CUDA_ARCH__ >= 890
  if (kind == QKV_KIND_E5M2) return cvt_e5m2x2(v[0], v[1]) | (uint32_t)cvt_e5m2x2(v[2], v[3]) << 16;
  return cvt_e4m3x2(v[0], v[1]) | (uint32_t)cvt_e4m3x2(v[2], v[3]) << 16;
#else
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) word |= fp8_encode_integer(kind == QKV_KIND_E5M2, v[i]) << (8 * i);
  return word;
#endif
}

__device__ __forceinline__ uint8_t fp8_encode1(uint32_t kind, float v) {
#if __CUDA_ARCH__ >= 890
  return (uint8_t)(kind == QKV_KIND_E5M2 ? cvt_e5m2x2(v, 0.0f) : cvt_e4m3x2(v, 0.0f));
#else
  return (uint8_t)fp8_encode_integer(kind == QKV_KIND_E5M2, v);
#endif
}

// Four values of four bytes, scale not applied: exact.
__device__ __forceinline__ void fp8_decode4(uint32_t kind, uint32_t word, float* x) {
#if __CUDA_ARCH__ >= 890
  bool e5m2 = kind == QKV_KIND_E5M2;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    uint16_t bytes = (uint16_t)(word >> (16 * i));
    uint32_t halves = e5m2 ? cvt_f16x2_e5m2x2(bytes) : cvt_f16x2_e4m3x2(bytes);
    x[2 * i] = half_to_float((uint16_t)halves);
    x[2 * i + 1] = half_to_float((uint16_t)(halves >> 16));
  }
#else
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = fp8_decode_integer(kind == QKV_KIND_E5M2, word >> (8 * i) & 0xff);
#endif
}

__device__ __forceinline__ float fp8_decode1(uint32_t kind, uint8_t byte) {
  float x[4];
  fp8_decode4(kind, byte, x);
  return x[0];
}

// Bits of the magnitude of a finite value, 0 for others: integers order them as the values are ordered.
__device__ __forceinline__ uint32_t finite_magnitude(float x) {
  uint32_t a = bits_of(x) & 0x7fffffff;
  return a < 0x7f800000 ? a : 0;
}

// The scale that maps a magnitude to the largest finite byte, at least the smallest normal f32; 1 for 0.
__device__ __forceinline__ float fp8_scale(uint32_t kind, uint32_t magnitude) {
  if (magnitude == 0) return 1.0f;
  float s = quotient(from_bits(magnitude), fp8_max(kind));
  float least = from_bits(0x00800000);
  return s < least ? least : s;
}

// Whether a finite quotient is beyond what rounds to the largest finite byte: 464 rounds down to even, 61440 up.
__device__ __forceinline__ bool fp8_saturates(uint32_t kind, float v) {
  float a = fabsf(v);
  return kind == QKV_KIND_E5M2 ? a >= 61440.0f : a > 464.0f;
}

}  // namespace qkv
