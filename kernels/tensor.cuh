// Strided tensors [tokens, heads, dim] of f16, bf16 or f32: addresses, and elements as f32.
#pragma once
#include "abi.h"
#include "numeric.cuh"

namespace qkv {

// Offset of the first channel of (token, head), in elements.
__device__ __forceinline__ int64_t row_offset(const QkvTensor& t, uint64_t token, uint32_t head) {
  // One batch row is the usual case and needs no division.
  uint64_t batch = token < t.batch_tokens ? 0 : token / t.batch_tokens;
  uint64_t inside = token - batch * t.batch_tokens;
  return (int64_t)batch * t.strides[0] + (int64_t)inside * t.strides[1] + (int64_t)head * t.strides[2];
}

__device__ __forceinline__ uint32_t element_bytes(uint32_t dtype) { return dtype == QKV_F32 ? 4 : 2; }

// Element at an offset.
__device__ __forceinline__ float load_element(const QkvTensor& t, int64_t offset) {
  if (t.dtype == QKV_F32) return __ldg((const float*)t.data + offset);
  uint16_t bits = __ldg((const unsigned short*)t.data + offset);
  return t.dtype == QKV_F16 ? half_to_float(bits) : bfloat_to_float(bits);
}

// Stores an element, rounded half to even.
__device__ __forceinline__ void store_element(const QkvTensor& t, int64_t offset, float x) {
  if (t.dtype == QKV_F32) {
    ((float*)t.data)[offset] = x;
  } else {
    ((uint16_t*)t.data)[offset] = t.dtype == QKV_F16 ? float_to_half(x) : float_to_bfloat(x);
  }
}

// Elements of a dtype as they are, 16 bytes at a time: 8 of f16 and bf16, 4 of f32.
__device__ __forceinline__ void unpack_vector(uint32_t dtype, uint4 v, float* x) {
  uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (dtype == QKV_F32) {
      x[i] = from_bits(w[i]);
    } else if (dtype == QKV_F16) {
      x[2 * i] = half_to_float((uint16_t)w[i]);
      x[2 * i + 1] = half_to_float((uint16_t)(w[i] >> 16));
    } else {
      x[2 * i] = from_bits(w[i] << 16);
      x[2 * i + 1] = from_bits(w[i] & 0xffff0000);
    }
  }
}

__device__ __forceinline__ uint4 pack_vector(uint32_t dtype, const float* x) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (dtype == QKV_F32) {
      w[i] = bits_of(x[i]);
    } else if (dtype == QKV_F16) {
      w[i] = float_to_half(x[2 * i]) | (uint32_t)float_to_half(x[2 * i + 1]) << 16;
    } else {
      w[i] = float_to_bfloat(x[2 * i]) | (uint32_t)float_to_bfloat(x[2 * i + 1]) << 16;
    }
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Whether every row can be read 16 bytes at a time: channels side by side, rows a multiple of 16 bytes apart.
__device__ __forceinline__ bool rows_are_vectors(const QkvTensor& t) {
  // A power of two, which the compiler does not see: it would divide.
  const uint32_t below = 16 / element_bytes(t.dtype) - 1;
  const uint32_t apart = (uint32_t)t.strides[0] | (uint32_t)t.strides[1] | (uint32_t)t.strides[2] | t.dim;
  return t.strides[3] == 1 && (apart & below) == 0 && t.data % 16 == 0;
}

}  // namespace qkv
