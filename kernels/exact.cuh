// Exact rows: window and sinks of a cache, f16 or bf16, and rounding to them. Four channels at a time: 8 bytes of a row.
#pragma once
#include "tensor.cuh"

namespace qkv {

// Four neighbouring channels of a strided row, as f32.
__device__ __forceinline__ void load4(const QkvTensor& t, bool vectors, int64_t row, uint32_t channel, float* x) {
  if (!vectors) {
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = load_element(t, row + (channel + i) * t.strides[3]);
    return;
  }
  const char* at = (const char*)t.data + (row + channel) * element_bytes(t.dtype);
  uint4 v = make_uint4(0, 0, 0, 0);
  if (t.dtype == QKV_F32) {
    v = __ldg((const uint4*)at);
    unpack_vector(QKV_F32, v, x);
    return;
  }
  uint2 two = __ldg((const uint2*)at);
  float y[8];
  unpack_vector(t.dtype, make_uint4(two.x, two.y, 0, 0), y);
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = y[i];
}

// The bits of an exact row's element: finite values that f16 does not hold become the largest it does, and are counted.
__device__ __forceinline__ uint16_t exact_bits(uint32_t dtype, float x, uint32_t& clamped) {
  if (dtype == QKV_BF16) return float_to_bfloat(x);
  uint32_t a = bits_of(x) & 0x7fffffff;
  if (a > bits_of(kLimit) && a < bits_of(kInfinity)) {
    clamped++;
    x = x < 0.0f ? -kLimit : kLimit;
  }
  return float_to_half(x);
}

__device__ __forceinline__ float exact_value(uint32_t dtype, uint16_t bits) {
  return dtype == QKV_BF16 ? bfloat_to_float(bits) : half_to_float(bits);
}

// Four elements rounded to the dtype of exact rows.
__device__ __forceinline__ uint2 exact4(uint32_t dtype, const float* x, uint32_t& clamped) {
  uint32_t h[4];
#pragma unroll
  for (int i = 0; i < 4; i++) h[i] = exact_bits(dtype, x[i], clamped);
  return make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
}

__device__ __forceinline__ void unpack4(uint32_t dtype, uint2 v, float* x) {
  x[0] = exact_value(dtype, (uint16_t)v.x);
  x[1] = exact_value(dtype, (uint16_t)(v.x >> 16));
  x[2] = exact_value(dtype, (uint16_t)v.y);
  x[3] = exact_value(dtype, (uint16_t)(v.y >> 16));
}

}  // namespace qkv
