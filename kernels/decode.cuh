// Rows of codes in shared memory, decoded into a strided tensor: the twin of `decode_rows` in `src/quant/page.rs`. Affine:
// step * code + min, both rounded, un-rotated, the mean added; FP8: scale * float(byte); then rounded once to the tensor's
// type.
//
// Tensors whose rows are vectors: a lane makes 16 bytes, 8 channels (4 of f32), and the 8 lanes of a phase take 8 neighbouring
// rows, which begin in different banks; four vectors of a row are in one warp, so that stores fill whole sectors. Others, and
// rotated rows: a warp takes a row, a lane every 32nd channel, as the butterflies want it.
#pragma once
#include "fp8.cuh"
#include "hadamard.cuh"
#include "layout.cuh"
#include "tensor.cuh"

namespace qkv {

// Rows of codes and what they mean.
struct Coded {
  QkvFormat f;
  uint32_t dim;
  // Shared memory: bytes of rows `stride` bytes apart, 16-byte aligned; 16-bit elements lie likewise.
  const uint8_t* codes;
  uint32_t stride;
  // Pairs or scales in row order. Pairs are two f16, or two f32 where `wide`.
  const uint32_t* pairs;
  uint32_t wide;
  // Words between the pairs of one row (per token) or token group (per channel) and the next.
  uint32_t pair_stride;
  // FP8 with static scales.
  float scale;
  // f16 [dim], or null.
  const uint16_t* mean;
};

// Rows first, first + 1 ..: row i is token + i / per, head + i % per.
struct Run {
  uint64_t token;
  uint32_t head;
  uint32_t per;
  uint32_t first;
  uint32_t rows;
};

__device__ __forceinline__ float2 pair_value(const Coded& s, const uint32_t* row, uint32_t index) {
  if (s.wide) {
    uint2 p = ((const uint2*)row)[index];
    return make_float2(from_bits(p.x), from_bits(p.y));
  }
  uint32_t p = row[index];
  return make_float2(half_to_float((uint16_t)p), half_to_float((uint16_t)(p >> 16)));
}

// Where the pairs of a row begin.
__device__ __forceinline__ const uint32_t* row_pairs(const Coded& s, const Run& run, uint32_t row) {
  if (s.f.kind == QKV_KIND_AFFINE && s.f.per_channel) {
    uint32_t i = run.first + row;
    return s.pairs + (i / run.per / s.f.group * run.per + i % run.per) * s.pair_stride;
  }
  return s.pairs + row * s.pair_stride;
}

// Channels c .. c + P of a row; P is 8, 4 or 1 and divides c. `Any`: the format may be another than affine.
template <bool Any, int P>
__device__ __forceinline__ void decode(const Coded& s, const Run& run, uint32_t row, uint32_t c, float (&x)[P]) {
  const uint8_t* codes = s.codes + row * s.stride;
  if (Any && is_half(s.f.kind)) {
    uint32_t w[(P + 1) / 2];
    const uint16_t* h = (const uint16_t*)codes + c;
    if constexpr (P == 8) {
      uint4 v = *(const uint4*)h;
      w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    } else if constexpr (P == 4) {
      uint2 v = *(const uint2*)h;
      w[0] = v.x, w[1] = v.y;
    } else {
      w[0] = *h;
    }
#pragma unroll
    for (int i = 0; i < P; i++) {
      uint16_t bits = (uint16_t)(w[i / 2] >> (16 * (i % 2)));
      x[i] = s.f.kind == QKV_KIND_F16 ? half_to_float_nan(bits) : bfloat_to_float(bits);
    }
    return;
  }
  uint32_t w[(P + 3) / 4];
  if constexpr (P == 8) {
    uint2 v = *(const uint2*)(codes + c);
    w[0] = v.x, w[1] = v.y;
  } else if constexpr (P == 4) {
    w[0] = *(const uint32_t*)(codes + c);
  } else {
    w[0] = codes[c];
  }
  const uint32_t* pairs = row_pairs(s, run, row);
  if (Any && s.f.kind != QKV_KIND_AFFINE) {
    float scale = s.f.granularity == QKV_SCALE_TOKEN_HEAD ? from_bits(*pairs) : s.scale;
#pragma unroll
    for (int i = 0; i < (P + 3) / 4; i++) {
      float y[4];
      fp8_decode4(s.f.kind, w[i], y);
#pragma unroll
      for (int j = 0; j < 4 && 4 * i + j < P; j++) x[4 * i + j] = mul(y[j], scale);
    }
    return;
  }
  auto code = [&](int i) { return (float)(w[i / 4] >> (8 * (i % 4)) & 0xff); };
  if (s.f.per_channel) {
    if (P > 1 && !s.wide) {
      // Rows of pairs are 16-byte aligned, as vectors have whole groups of four channels.
#pragma unroll
      for (int i = 0; i < P; i += 4) {
        uint4 v = *(const uint4*)(pairs + c + i);
        uint32_t p[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4 && i + j < P; j++) {
          x[i + j] = add(mul(half_to_float((uint16_t)p[j]), code(i + j)), half_to_float((uint16_t)(p[j] >> 16)));
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < P; i++) {
        float2 p = pair_value(s, pairs, c + i);
        x[i] = add(mul(p.x, code(i)), p.y);
      }
    }
    return;
  }
  uint32_t group = c / s.f.group, left = (group + 1) * s.f.group - c;
  float2 p = pair_value(s, pairs, group);
#pragma unroll
  for (int i = 0; i < P; i++) {
    if (i == left) {
      p = pair_value(s, pairs, ++group);
      left += s.f.group;
    }
    x[i] = add(mul(p.x, code(i)), p.y);
  }
}

__device__ __forceinline__ float mean_value(const Coded& s, uint32_t c) { return half_to_float(__ldg((const unsigned short*)s.mean + c)); }

__device__ __forceinline__ int64_t run_offset(const QkvTensor& out, const Run& run, uint32_t row) {
  uint32_t i = run.first + row;
  if (run.per == 1) return row_offset(out, run.token + i, run.head);
  return row_offset(out, run.token + i / run.per, run.head + i % run.per);
}

template <bool Any, int P>
__device__ __forceinline__ void store_vectors(const Coded& s, const QkvTensor& out, const Run& run) {
  const uint32_t vectors = s.dim / P, parts = (run.rows + 7) / 8 * 8 * vectors;
  for (uint32_t i = threadIdx.x; i < parts; i += blockDim.x) {
    uint32_t row = i / 8 / vectors * 8 + i % 8, c = i / 8 % vectors * P;
    if (row >= run.rows) continue;
    float x[P];
    decode<Any>(s, run, row, c, x);
    if (s.mean) {
#pragma unroll
      for (int j = 0; j < P; j++) x[j] = add(x[j], mean_value(s, c + j));
    }
    int64_t at = run_offset(out, run, row) + c;
    *(uint4*)((char*)out.data + at * (int64_t)(16 / P)) = pack_vector(P == 4 ? QKV_F32 : out.dtype, x);
  }
}

template <bool Any, int R>
__device__ __forceinline__ void store_rotated(const Coded& s, const QkvTensor& out, const Run& run) {
  const uint32_t lane = threadIdx.x % 32, blocks = s.dim / (32 * R);
  for (uint32_t i = threadIdx.x / 32; i < run.rows * blocks; i += blockDim.x / 32) {
    uint32_t row = i / blocks, first = i % blocks * 32 * R + lane;
    float x[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
      float y[1];
      decode<Any>(s, run, row, first + 32 * r, y);
      x[r] = y[0];
    }
    hadamard<R>(x, lane);
    int64_t at = run_offset(out, run, row);
#pragma unroll
    for (int r = 0; r < R; r++) {
      uint32_t c = first + 32 * r;
      store_element(out, at + c * out.strides[3], s.mean ? add(x[r], mean_value(s, c)) : x[r]);
    }
  }
}

template <bool Any>
__device__ __forceinline__ void store_elements(const Coded& s, const QkvTensor& out, const Run& run) {
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t row = threadIdx.x / 32; row < run.rows; row += blockDim.x / 32) {
    int64_t at = run_offset(out, run, row);
    for (uint32_t c = lane; c < s.dim; c += 32) {
      float x[1];
      decode<Any>(s, run, row, c, x);
      store_element(out, at + c * out.strides[3], s.mean ? add(x[0], mean_value(s, c)) : x[0]);
    }
  }
}

// Decodes a run of rows into `out`; called by all threads of a block of whole warps, after a barrier.
template <bool Any>
__device__ __forceinline__ void store_rows(const Coded& s, const QkvTensor& out, const Run& run) {
  if (s.f.kind == QKV_KIND_AFFINE && s.f.rotate) {
    if (s.f.rotate == 32) store_rotated<Any, 1>(s, out, run);
    if (s.f.rotate == 64) store_rotated<Any, 2>(s, out, run);
    if (s.f.rotate == 128) store_rotated<Any, 4>(s, out, run);
  } else if (!rows_are_vectors(out)) {
    store_elements<Any>(s, out, run);
  } else if (out.dtype == QKV_F32) {
    store_vectors<Any, 4>(s, out, run);
  } else {
    store_vectors<Any, 8>(s, out, run);
  }
}

}  // namespace qkv
