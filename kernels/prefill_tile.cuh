// What prefill does with a staged tile and its sums: products by tensor cores, rotation, and values that are no numbers.
#pragma once
#include "hadamard.cuh"
#include "prefill_stage.cuh"

namespace qkv {

// Tokens, or columns of a tile, [from, to).
struct Span {
  int32_t from, to;
};

// d = queries · keys of a tile: d[n] has tokens 8n + 2t and the next of rows g and g + 8.
template <int DK>
__device__ __forceinline__ void scores(float (&d)[8][4], uint32_t queries, uint32_t keys) {
#pragma unroll
  for (int n = 0; n < 8; n++) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.0f;
#pragma unroll
  for (int k = 0; k < DK / 16; k++) {
    uint32_t a[4], b[4];
    ldmatrix(a, queries + 32 * k);
#pragma unroll
    for (int n = 0; n < 4; n++) {
      ldmatrix(b, keys + 32 * k + n * 16 * kRowBytes<DK>);
      const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
      mma_f16(d[2 * n], a, low);
      mma_f16(d[2 * n + 1], a, high);
    }
  }
}

// out += weights · values; out[n] has channels 8n + 2t and the next. `transposed`: values of a page.
template <int DV, bool Page, int N>
__device__ __forceinline__ void weigh(float (&out)[N][4], const uint32_t (&weights)[4][4], uint32_t values) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    // Of a page's channels, whose tile begins at a multiple of 128 bytes, the vectors are exchanged (prefill_stage.cuh).
    const uint32_t row = (lane & 7) + (lane >> 4) * 8, first = values + row * kChannelBytes + ((lane >> 3 & 1 ^ lane & 7) << 4);
    const uint32_t at = Page ? first ^ 32 * j
                             : values + (16 * j + (lane & 15)) * kRowBytes<DV> + (lane >> 4) * 16;
#pragma unroll
    for (int n = 0; n < N / 2; n++) {
      uint32_t b[4];
      if (Page) {
        ldmatrix(b, at + n * 16 * kChannelBytes);
      } else {
        ldmatrix_transposed(b, at + n * 32);
      }
      const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
      mma_f16(out[2 * n], weights[j], low);
      mma_f16(out[2 * n + 1], weights[j], high);
    }
  }
}

// out = H out for blocks of 32, 64 or 128 channels: bit 0 of a channel is in a register pair, 1 and 2 are in the lane.
template <int N>
__device__ __forceinline__ void rotate_back(float (&out)[N][4], uint32_t block) {
  const uint32_t lane = threadIdx.x % 32;
  const float factor = block == 32 ? hadamard_factor<32>() : block == 64 ? hadamard_factor<64>() : hadamard_factor<128>();
#pragma unroll
  for (int n = 0; n < N; n++) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float a = out[n][i], b = out[n][i + 1];
      out[n][i] = (a + b) * factor, out[n][i + 1] = (a - b) * factor;
    }
#pragma unroll
    for (int s = 1; s <= 2; s *= 2) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float other = __shfl_xor_sync(0xffffffff, out[n][i], s);
        out[n][i] = lane & s ? other - out[n][i] : out[n][i] + other;
      }
    }
  }
#pragma unroll
  for (int s = 1; s <= 8; s *= 2) {
    if (8 * s >= (int)block) break;
#pragma unroll
    for (int n = 0; n < N; n++) {
      if ((n & s) || n + s >= N) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float a = out[n][i], b = out[n + s][i];
        out[n][i] = a + b, out[n + s][i] = a - b;
      }
    }
  }
}

__device__ __forceinline__ uint64_t span_bits(Span s) {
  const int32_t from = max(s.from, 0), to = min(s.to, QKV_TILE);
  if (from >= to) return 0;
  return ~0ull >> (QKV_TILE - (to - from)) << from;
}

// Whether the staged values have one that is no number.
template <int DV>
__device__ __forceinline__ bool values_not_finite(const uint8_t* values, bool page) {
  const uint32_t vectors = page ? DV * kChannelBytes / 16 : QKV_TILE * (DV / 8);
  uint32_t bad = 0;
  for (uint32_t i = threadIdx.x; i < vectors; i += blockDim.x) {
    const uint4 x = page ? ((const uint4*)values)[i] : *(const uint4*)(values + i / (DV / 8) * kRowBytes<DV> + i % (DV / 8) * 16);
    bad |= not_finite(x.x) | not_finite(x.y) | not_finite(x.z) | not_finite(x.w);
  }
  return bad != 0;
}

// Sets such values to 0 and the sums of rows that see them to NaN. `masks` is shared memory for a word pair a channel;
// `channel` is the first of this warp's. All threads.
template <int DV, int N>
__device__ __forceinline__ void poison(float (&out)[N][4], uint8_t* values, bool page, uint32_t* masks, uint32_t channel, Span upper, Span lower) {
  for (uint32_t i = threadIdx.x; i < 2 * DV; i += blockDim.x) masks[i] = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < QKV_TILE * DV; i += blockDim.x) {
    const uint32_t token = i / DV, channel = i % DV;
    uint16_t* v = page ? (uint16_t*)(values + channel * kChannelBytes + ((token >> 3 ^ (channel & 7)) << 4)) + (token & 7)
                       : (uint16_t*)(values + token * kRowBytes<DV>) + channel;
    if ((*v & 0x7c00) == 0x7c00) {
      *v = 0;
      atomicOr(masks + 2 * channel + token / 32, 1u << token % 32);
    }
  }
  __syncthreads();
  const uint64_t above = span_bits(upper), below = span_bits(lower);
  const float nan = kInfinity - kInfinity;
#pragma unroll
  for (int n = 0; n < N; n++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t* m = masks + 2 * (channel + 8 * n + 2 * (threadIdx.x % 4) + i);
      const uint64_t mask = m[0] | (uint64_t)m[1] << 32;
      if (mask & above) out[n][i] = nan;
      if (mask & below) out[n][2 + i] = nan;
    }
  }
  __syncthreads();
}

}  // namespace qkv
