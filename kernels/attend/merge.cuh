// Results of the warps of a block, and of the blocks of a unit, into one row of output: weights of all are brought to the largest
// reference. The order of sums is fixed.
#pragma once
#include "state.cuh"

namespace qkv {

// Shared memory where the warps of a block add up their outputs: [column][channel]. The lanes of a warp write 8 channels of four
// columns (every second one of 8 or more, or 4 of 4) at a time; these begin 8 banks apart.
template <int D, int Columns>
struct MergeShared {
  static constexpr int kStride = D + (Columns == 4 ? 8 : 4);
  float reference[kWarps][Columns], sum[kWarps][Columns];
  float out[Columns][kStride];
};

// Adds a sink logit and says what a row's outputs are multiplied with, and its LSE.
struct Row {
  float factor, lse;

  __device__ __forceinline__ Row(const QkvAttend& p, uint32_t query_head, float reference, float sum) {
    float scale = 1;
    if (p.sink_logits) {
      float sink = __ldg((const float*)p.sink_logits + query_head) * kLog2e;
      float most = fmaxf(reference, sink);
      scale = exp2_fast(reference - most);
      sum = sum * scale + exp2_fast(sink - most);
      reference = most;
    }
    bool empty = sum == 0;
    factor = empty ? 0.0f : scale / sum;
    lse = empty ? -kInfinity : (reference + log2f(sum)) * kLn2;
  }
};

// Where a column's row lies: its row of the tensors and its query head.
struct RowPlace {
  uint64_t row;
  uint32_t head;

  __device__ __forceinline__ RowPlace(const QkvAttend& p, const Unit& u, uint32_t column) {
    uint32_t index = u.first_column + column;
    row = (uint64_t)u.s.first_row + index / p.group;
    head = u.head * p.group + index % p.group;
  }
};

__device__ __forceinline__ void store_output(const QkvAttend& p, const RowPlace& at, uint32_t channel, float x) {
  store_element(p.out, row_offset(p.out, at.row, at.head) + (int64_t)channel * p.out.strides[3], x);
}

__device__ __forceinline__ void store_lse(const QkvAttend& p, const RowPlace& at, float lse) {
  if (p.lse) ((float*)p.lse)[at.row * (p.heads * p.group) + at.head] = lse;
}

// All warps of the block. `place`: -1 = the unit is whole and its rows are written, else where its partial result goes.
template <int D, int Columns, class State>
__device__ void merge_warps(const QkvAttend& p, const Unit& u, int64_t place, State& w, MergeShared<D, Columns>& shared,
                            uint32_t warp, uint32_t lane) {
  const uint32_t g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < State::kColumns; j++) {
    uint32_t c = State::column(j, t);
    float sum = rows_sum(w.sum[j]);
    if (g == 0) {
      shared.reference[warp][c] = w.reference[j];
      shared.sum[warp][c] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < State::kColumns; j++) {
    uint32_t c = State::column(j, t);
    float most = shared.reference[0][c];
#pragma unroll
    for (int i = 1; i < (int)kWarps; i++) most = fmaxf(most, shared.reference[i][c]);
    float factor = exp2_fast(w.reference[j] - most);
#pragma unroll
    for (int m = 0; m < D / 16; m++) w.at(m, j, 0) *= factor, w.at(m, j, 1) *= factor;
  }
  for (uint32_t turn = 0; turn < kWarps; turn++) {
    if (warp == turn) {
#pragma unroll
      for (int m = 0; m < D / 16; m++) {
#pragma unroll
        for (int i = 0; i < 2 * State::kColumns; i++) {
          float& x = shared.out[State::column(i / 2, t)][16 * m + 8 * (i % 2) + g];
          x = turn == 0 ? w.at(m, i / 2, i % 2) : x + w.at(m, i / 2, i % 2);
        }
      }
    }
    __syncthreads();
  }
  float* to = place < 0 ? nullptr : partial(p, (uint64_t)place);
  for (uint32_t c = warp; c < (uint32_t)min(Columns, u.columns); c += kWarps) {
    float most = kNoReference, sum = 0;
#pragma unroll
    for (int i = 0; i < (int)kWarps; i++) most = fmaxf(most, shared.reference[i][c]);
#pragma unroll
    for (int i = 0; i < (int)kWarps; i++) sum += shared.sum[i][c] * exp2_fast(shared.reference[i][c] - most);
    if (to) {
      if (lane == 0) {
        to[c] = most;
        to[Columns + c] = sum;
      }
#pragma unroll 1
      for (uint32_t d = lane; d < D; d += 32) to[2 * Columns + c * D + d] = shared.out[c][d];
    } else {
      RowPlace at(p, u, c);
      Row row(p, at.head, most, sum);
      // An empty row is 0 even where its outputs are not numbers.
#pragma unroll 1
      for (uint32_t d = lane; d < D; d += 32) {
        store_output(p, at, d, row.factor == 0 ? 0.0f : shared.out[c][d] * row.factor);
      }
      if (lane == 0) store_lse(p, at, row.lse);
    }
  }
  // The next unit writes the same memory.
  __syncthreads();
}

}  // namespace qkv
