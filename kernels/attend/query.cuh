// The queries of a unit, prepared once for all its items in shared memory: as B operands for pages (rotated where the keys are)
// and for exact rows, each column with a power of two of its own so that it fits f16.
//
// Column c of a unit is query i = c / group, head c mod group of the kv head's query heads.
#pragma once
#include "../hadamard.cuh"
#include "../softmax.cuh"
#include "../tensor.cuh"
#include "work.cuh"

namespace qkv {

constexpr uint32_t kWarps = 4;

template <int D>
struct Dims {
  static constexpr int kSteps = D / 16;
  static constexpr int kBlocks = (D + 31) / 32;
  // Rows are read 32 channels at a time.
  static constexpr int kRowSteps = 2 * kBlocks;
};

// Factor that brings a largest magnitude into [0.5, 1), a power of two. 1 for 0.
__device__ __forceinline__ float normalizer(float most) {
  int e = (int)(bits_of(most) >> 23);
  if (most == 0) return 1;
  return from_bits((uint32_t)min(max(253 - e, 27), 227) << 23);
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int s = 16; s > 0; s /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, s));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int s = 16; s > 0; s /= 2) x += __shfl_xor_sync(kAllLanes, x, s);
  return x;
}

// One query row, channel 32k + lane in x[k].
template <int D>
struct QueryRow {
  static constexpr int kBlocks = Dims<D>::kBlocks;
  float x[kBlocks];

  __device__ __forceinline__ void load(const QkvAttend& p, const Unit& u, uint32_t column, uint32_t lane) {
    uint32_t index = u.first_column + column;
    bool there = column < (uint32_t)u.columns;
    int64_t at = 0;
    if (there) at = row_offset(p.q, (uint64_t)u.s.first_row + index / p.group, u.head * p.group + index % p.group);
    float sign = p.scale < 0 ? -1.0f : p.scale == 0 ? 0.0f : 1.0f;
    bool sound = true;
#pragma unroll
    for (int k = 0; k < kBlocks; k++) {
      uint32_t c = 32 * k + lane;
      x[k] = there && c < D ? load_element(p.q, at + c * p.q.strides[3]) : 0.0f;
      sound &= fabsf(x[k]) < kInfinity;
      x[k] *= sign;
    }
    // A row with NaN or infinity is NaN, whatever it meets.
    if (!__all_sync(kAllLanes, sound)) {
#pragma unroll
      for (int k = 0; k < kBlocks; k++) x[k] = from_bits(0x7fffffff);
    }
  }

  __device__ __forceinline__ void rotate(uint32_t block, uint32_t lane) {
    if (block == 32) {
#pragma unroll
      for (int k = 0; k < kBlocks; k++) {
        float y[1] = {x[k]};
        hadamard<1>(y, lane);
        x[k] = y[0];
      }
    } else if (block == 64) {
      rotate_blocks<2>(lane);
    } else if (block == 128) {
      rotate_blocks<4>(lane);
    }
  }

  template <int R>
  __device__ __forceinline__ void rotate_blocks(uint32_t lane) {
#pragma unroll
    for (int k = 0; k + R <= kBlocks; k += R) {
      float y[R];
#pragma unroll
      for (int i = 0; i < R; i++) y[i] = x[k + i];
      hadamard<R>(y, lane);
#pragma unroll
      for (int i = 0; i < R; i++) x[k + i] = y[i];
    }
  }

  __device__ __forceinline__ float most() const {
    float m = 0;
#pragma unroll
    for (int k = 0; k < kBlocks; k++) m = fmaxf(m, fabsf(x[k]));
    return warp_max(m);
  }

  // Sum of products with f16 [D].
  __device__ __forceinline__ float dot(const uint16_t* y, uint32_t lane) const {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kBlocks; k++) {
      uint32_t c = 32 * k + lane;
      if (c < D) sum = fmaf(x[k], half_to_float(__ldg(y + c)), sum);
    }
    return warp_sum(sum);
  }
};

// A softcap divides by a factor, and 1 / x has to be finite. Where raw scores are below 1e30, logits are as good as 0 either way.
constexpr float kLeastFactor = 1e-36f;

// A column's factor from raw scores to log2 units; `scale` is of the logits.
__device__ __forceinline__ float score_factor(float scale, float normalizer) {
  float f = (scale == 0 ? 1.0f : fabsf(scale)) * kLog2e / normalizer;
  return fmaxf(f, kLeastFactor);
}

// The 16-bit value nearest to x, and the value of such bits.
__device__ __forceinline__ uint16_t to_row_type(float x, bool bfloat) {
  return bfloat ? float_to_bfloat(x) : float_to_half(x);
}

__device__ __forceinline__ float from_row_type(uint16_t x, bool bfloat) {
  return bfloat ? bfloat_to_float(x) : half_to_float(x);
}

// Place of (step of 16, lane, 16-bit element) of channel c and column n in B operands, in units of 16 bits within a tile of 8
// columns. Pages take channels 16 kb + {2t, 2t + 1, 2t + 8, 2t + 9} of lane t, rows eight neighbours 32j + 8t ...
__device__ __forceinline__ uint32_t page_place(uint32_t c, uint32_t n) {
  uint32_t x = c % 16, t = x / 2 % 4;
  return ((c / 16 * 32 + 4 * n + t) * 2 + x / 8) * 2 + x % 2;
}

// The same where two steps lie side by side.
__device__ __forceinline__ uint32_t paired_place(uint32_t c, uint32_t n) {
  uint32_t x = c % 16, t = x / 2 % 4;
  return ((c / 32 * 32 + 4 * n + t) * 4 + x / 8 * 2 + c / 16 % 2) * 2 + x % 2;
}

__device__ __forceinline__ uint32_t row_place(uint32_t c, uint32_t n) {
  uint32_t t = c / 8 % 4, e = c % 8;
  return (((2 * (c / 32) + e / 4) * 32 + 4 * n + t) * 2 + e / 2 % 2) * 2 + e % 2;
}

}  // namespace qkv
