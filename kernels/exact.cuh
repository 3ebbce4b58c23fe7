// Exact rows: window and sinks of a cache, f16 or bf16, and rounding to them. Four channels at a time: 8 bytes of a row.
#pragma once
#include "tensor.cuh"

namespace qkv {

__device__ __forceinline__ float exact_value(uint32_t dtype, uint16_t bits) {
  return dtype == QKV_BF16 ? bfloat_to_float(bits) : half_to_float_nan(bits);
}

__device__ __forceinline__ void unpack4(uint32_t dtype, uint2 v, float* x) {
  x[0] = exact_value(dtype, (uint16_t)v.x);
  x[1] = exact_value(dtype, (uint16_t)(v.x >> 16));
  x[2] = exact_value(dtype, (uint16_t)v.y);
  x[3] = exact_value(dtype, (uint16_t)(v.y >> 16));
}

// Four neighbouring channels of a strided row, as f32.
__device__ __forceinline__ void load4(const QkvTensor& t, bool vectors, int64_t row, uint32_t channel, float* x) {
  if (t.dtype == QKV_F32) {
    const float* at = (const float*)t.data + row + channel * t.strides[3];
    if (vectors) {
      float4 v = __ldg((const float4*)at);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __ldg(at + i * t.strides[3]);
    return;
  }
  const unsigned short* at = (const unsigned short*)t.data + row + channel * t.strides[3];
  if (vectors) {
    unpack4(t.dtype, __ldg((const uint2*)at), x);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = exact_value(t.dtype, __ldg(at + i * t.strides[3]));
}

// Four neighbouring channels of a row of vectors.
__device__ __forceinline__ void store4(const QkvTensor& t, int64_t at, const float* x) {
  if (t.dtype == QKV_F32) {
    *(float4*)((float*)t.data + at) = make_float4(x[0], x[1], x[2], x[3]);
    return;
  }
  uint32_t h[4];
#pragma unroll
  for (int i = 0; i < 4; i++) h[i] = t.dtype == QKV_F16 ? float_to_half(x[i]) : float_to_bfloat(x[i]);
  *(uint2*)((uint16_t*)t.data + at) = make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
}

// The bits of an exact row's element: finite values that f16 does not hold become the largest it does, and are counted.
__device__ __forceinline__ uint16_t exact_bits(uint32_t dtype, float x, uint32_t& clamped) {
  if (dtype == QKV_BF16) return float_to_bfloat(x);
  uint32_t a = bits_of(x) & 0x7fffffff;
  if (a > bits_of(kLimit) && a < bits_of(kInfinity)) {
    clamped++;
    x = x < 0.0f ? -kLimit : kLimit;
  }
  return float_to_half_nan(x);
}

// Four elements rounded to the dtype of exact rows.
__device__ __forceinline__ uint2 exact4(uint32_t dtype, const float* x, uint32_t& clamped) {
  uint32_t h[4];
#pragma unroll
  for (int i = 0; i < 4; i++) h[i] = exact_bits(dtype, x[i], clamped);
  return make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
}

}  // namespace qkv
