// What a warp carries through its items: for each of its columns the softmax reference, the sum of weights, and the output so far.
//
// Weights are p = 2^(score - reference). The reference is 7 below the largest score at which it last moved, and moves when a score
// exceeds it by more than 15: so weights stay below 2^15, which f16 holds, the small ones keep their bits, and moving is rare. A
// column moves by its own scores only, so that a query's result does not depend on others.
#pragma once
#include "query.cuh"

namespace qkv {

constexpr float kHeadroom = 7, kLimitAbove = 15;
// A reference that every score exceeds.
constexpr float kNoReference = -1e30f;

// Largest magnitude over the lanes that hold the same columns: those with equal t.
__device__ __forceinline__ float rows_max(float x) {
#pragma unroll
  for (int s = 4; s < 32; s *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, s));
  return x;
}

__device__ __forceinline__ float rows_sum(float x) {
#pragma unroll
  for (int s = 4; s < 32; s *= 2) x += __shfl_xor_sync(kAllLanes, x, s);
  return x;
}

// What the columns of a unit see of the tokens. In shared memory, since most pages are seen whole.
template <int Columns>
struct View {
  // Tokens [low, high] of each column; one that does not exist sees none.
  int32_t low[Columns], high[Columns];
  // First and last page of which nothing has to be masked, capped or cleared.
  int32_t whole_first, whole_last;

  // One thread a column.
  __device__ __forceinline__ void set(const QkvAttend& p, const Unit& u, uint32_t c) {
    const int32_t window = p.sliding_window ? (int32_t)min(p.sliding_window, 0x7fffffffu) : 0x7fffffff;
    const bool there = (int32_t)c < u.columns;
    const int32_t at = u.s.old_len + (int32_t)((u.first_column + min((int32_t)c, u.columns - 1)) / p.group);
    high[c] = there ? at : -1;
    low[c] = max(at - window + 1, 0);
    // The first column sees the least at the end, the last one at the beginning; sinks are not read from their page.
    if (c == 0) whole_last = (at + 1) / QKV_TILE - 1;
    if ((int32_t)c == u.columns - 1) {
      const int32_t low = max(max(at - window + 1, 0), (int32_t)p.sinks);
      whole_first = p.softcap > 0 ? 0x7fffffff : (int32_t)(((uint32_t)low + QKV_TILE - 1) / QKV_TILE);
    }
  }

  __device__ __forceinline__ bool whole(int32_t page) const { return page >= whole_first && page <= whole_last; }

  __device__ __forceinline__ bool sees(uint32_t c, int32_t token) const { return token >= low[c] && token <= high[c]; }
};

// Un-rotates the outputs of a warp: butterflies between registers, then between lanes.
template <int D, class State>
__device__ void rotate_output(State& w, uint32_t block, uint32_t lane) {
  const float factor = block == 32 ? hadamard_factor<32>() : block == 64 ? hadamard_factor<64>() : hadamard_factor<128>();
#pragma unroll
  for (int s = 4; s > 0; s /= 2) {
    // Tiles of 16 channels that are s apart. A head that is no multiple of the block never gets here.
    if (block >= 32u * s) {
#pragma unroll
      for (int m = 0; m < D / 16; m++) {
        if ((m & s) != 0 || m + s >= D / 16) continue;
#pragma unroll
        for (int i = 0; i < 2 * State::kColumns; i++) {
          float &a = w.at(m, i / 2, i % 2), &b = w.at(m + s, i / 2, i % 2), x = a, y = b;
          a = x + y;
          b = x - y;
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < D / 16; m++) {
#pragma unroll
    for (int j = 0; j < State::kColumns; j++) {
      float x[2] = {w.at(m, j, 0) + w.at(m, j, 1), w.at(m, j, 0) - w.at(m, j, 1)};
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int s = 4; s < 32; s *= 2) {
          float other = __shfl_xor_sync(kAllLanes, x[h], s);
          x[h] = lane & s ? other - x[h] : x[h] + other;
        }
        w.at(m, j, h) = x[h] * factor;
      }
    }
  }
}

}  // namespace qkv
