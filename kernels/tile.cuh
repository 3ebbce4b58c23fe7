// Encodes rows of one operand and head that lie in shared memory as f32, in whatever format: codes (bytes, or 16-bit elements) and
// pairs or scales, in shared memory too. Whole tiles go on to fragment order by pack.cuh, single tokens by scatter.cuh.
#pragma once
#include "encode.cuh"
#include "fp8.cuh"
#include "layout.cuh"

namespace qkv {

// Words between rows of a tile, and bytes between rows of its codes.
__device__ __forceinline__ uint32_t tile_stride(const QkvFormat& f, uint32_t dim) {
  return unit_stride(dim, f.kind == QKV_KIND_AFFINE ? f.per_channel : 0, f.group);
}

__device__ __forceinline__ uint32_t tile_code_stride(const QkvFormat& f, uint32_t dim) {
  return code_stride_for(is_half(f.kind) ? 2 * dim : dim);
}

// A warp has a token: its scale, and its bytes four at a time.
__device__ __forceinline__ uint32_t encode_fp8_rows(const QkvFormat& f, Unit u, float fixed, uint8_t* codes,
                                                    uint32_t code_stride, uint32_t* scales) {
  uint32_t lost = 0;
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t t = threadIdx.x / 32; t < u.tokens; t += blockDim.x / 32) {
    const float* x = u.x + t * u.stride;
    const bool live = t >= u.skip;
    float scale = fixed;
    if (f.granularity == QKV_SCALE_TOKEN_HEAD) {
      uint32_t m = 0;
      for (uint32_t c = lane; live && c < u.channels; c += 32) m = max(m, finite_magnitude(x[c]));
      m = __reduce_max_sync(0xffffffff, m);
      scale = fp8_scale(f.kind, m);
      if (lane == 0) scales[t] = live ? bits_of(scale) : 0;
    }
    for (uint32_t c = 4 * lane; c < u.channels; c += 128) {
      float q[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float v = x[c + i];
        bool finite = (bits_of(v) & 0x7fffffff) < bits_of(kInfinity);
        q[i] = quotient(v, scale);
        lost += live && finite && fp8_saturates(f.kind, q[i]);
      }
      *(uint32_t*)(codes + t * code_stride + c) = live ? fp8_encode4(f.kind, q) : 0;
    }
  }
  return lost;
}

__device__ __forceinline__ uint32_t encode_half_rows(const QkvFormat& f, Unit u, uint8_t* codes, uint32_t code_stride) {
  uint32_t clamped = 0;
  for (uint32_t t = threadIdx.x / 32; t < u.tokens; t += blockDim.x / 32) {
    uint16_t* out = (uint16_t*)(codes + t * code_stride);
    for (uint32_t c = threadIdx.x % 32; c < u.channels; c += 32) {
      float x = u.x[t * u.stride + c];
      if (f.kind == QKV_KIND_F16) x = t >= u.skip ? clamp_finite(x, clamped) : 0.0f;
      uint16_t bits = f.kind == QKV_KIND_F16 ? float_to_half_nan(x) : float_to_bfloat(x);
      out[c] = t >= u.skip ? bits : 0;
    }
  }
  return clamped;
}

// Encodes all rows of `u` (rotating and centring them in place first). All threads of a block take part; barriers stand before and
// after. `scale` is that of FP8 with a static one. Returns how many elements this thread clamped or saturated.
__device__ __forceinline__ uint32_t encode_tile(const QkvFormat& f, Unit u, const uint16_t* mean, float scale, uint8_t* codes,
                                                uint32_t code_stride, uint32_t* pairs) {
  if (f.kind != QKV_KIND_AFFINE) {
    return is_half(f.kind) ? encode_half_rows(f, u, codes, code_stride)
                           : encode_fp8_rows(f, u, scale, codes, code_stride, pairs);
  }
  uint32_t clamped = transform(f, u, mean);
  __syncthreads();
  return clamped + encode_affine<8>(f, u, codes, code_stride, pairs);
}

}  // namespace qkv
