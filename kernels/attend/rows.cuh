// Exact rows on the f16 path: window and sinks, 16 tokens at a time, in the tensor cores' type of the rows. Queries and weights
// enter as high and low parts of that type, so that rows stay exact.
#pragma once
#include "half_values.cuh"

namespace qkv {

// Channels of values that a warp stages at a time.
template <int D>
struct Staged {
  static constexpr int kChannels = D <= 128 ? D : 64;
  static constexpr int kBytes = 16 * kChannels * 2;
};

// Rows of one operand of a head.
struct RowMemory {
  const uint8_t* base;
  // Row of a token: token modulo this.
  uint32_t rows;
};

// Row of token `first` + i, where `at` is that of `first` and i at most the number of rows: no division for each.
template <int D>
__device__ __forceinline__ const uint8_t* row_of(const RowMemory& r, uint32_t at, uint32_t i) {
  const uint32_t row = at + i;
  return r.base + (uint64_t)(row < r.rows ? row : row - r.rows) * (2 * D);
}

// In the rows' type. One code serves both: the code for rows is a good part of a kernel, and runs rarely.
__device__ __forceinline__ void mma_rows(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bfloat) {
  if (bfloat) {
    mma_bf16(d, a, b);
  } else {
    mma_f16(d, a, b);
  }
}

// Window rows are written by the append before: they are read past the read-only cache.
__device__ __forceinline__ uint4 load_row16(const void* p) { return __ldcg((const uint4*)p); }

// Products of 16 key rows from `first` with `Parts` operands of NT tiles of columns each; rows at or beyond `end` are 0.
template <int D, int NT, int Parts>
__device__ __forceinline__ void key_rows(const uint2 (*parts)[Dims<D>::kRowSteps][32], const RowMemory& keys, int32_t first,
                                         int32_t end, bool bfloat, uint32_t lane, float (&sum)[NT][4]) {
  const uint32_t g = lane / 4, t = lane % 4;
  const bool there[2] = {first + (int32_t)g < end, first + (int32_t)g + 8 < end};
  const uint32_t at = (uint32_t)first % keys.rows;
  const uint8_t* row[2] = {row_of<D>(keys, at, g), row_of<D>(keys, at, g + 8)};
#pragma unroll
  for (int c = 0; c < Dims<D>::kBlocks; c++) {
    // Lane t has channels 32c + 8t .. + 7.
    bool inside = 32 * c + 8 * t < D;
    uint4 x[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      x[h] = there[h] && inside ? load_row16(row[h] + 64 * c + 16 * t) : make_uint4(0, 0, 0, 0);
    }
    const uint32_t a[2][4] = {{x[0].x, x[1].x, x[0].y, x[1].y}, {x[0].z, x[1].z, x[0].w, x[1].w}};
#pragma unroll
    for (int step = 0; step < 2; step++) {
#pragma unroll
      for (int i = 0; i < NT * Parts; i++) {
        uint2 b = parts[i][2 * c + step][lane];
        const uint32_t bits[2] = {b.x, b.y};
        mma_rows(sum[i % NT], a[step], bits, bfloat);
      }
    }
  }
}

// Products of 16 value rows, transposed, with `Parts` operands of NT tiles of columns: `add(m, nt, d)` for each 16 channels. Through
// shared memory, vectors of a row swapped so that the rows of a matrix lie in different banks.
template <int D, int NT, int Parts, class Add>
__device__ __forceinline__ void value_rows(const RowMemory& values, int32_t first, int32_t end,
                                           const uint32_t (&b)[Parts][NT][2], bool bfloat, uint32_t lane, uint8_t* stage,
                                           Add add) {
  constexpr int kChannels = Staged<D>::kChannels, kVectors = kChannels / 8;
  auto swapped = [](uint32_t row, uint32_t v) {
    return v ^ (kVectors % 8 == 0 ? row % 8 : kVectors % 4 == 0 ? row / 2 % 4 : row / 4 % 2);
  };
  const uint32_t at = (uint32_t)first % values.rows;
  const uint32_t stage_at = (uint32_t)__cvta_generic_to_shared(stage);
#pragma unroll
  for (int part = 0; part < D / kChannels; part++) {
    __syncwarp();
    for (uint32_t i = lane; i < 16 * kVectors; i += 32) {
      uint32_t row = i / kVectors, v = i % kVectors;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (first + (int32_t)row < end) {
        x = load_row16(row_of<D>(values, at, row) + part * (2 * kChannels) + v * 16);
      }
      *(uint4*)(stage + row * (2 * kChannels) + swapped(row, v) * 16) = x;
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kChannels / 16; m++) {
      // Matrices: channels 0-7 and 8-15 of tokens 0-7, then of tokens 8-15.
      uint32_t row = lane % 8 + lane / 16 * 8, v = 2 * m + lane / 8 % 2, a[4];
      ldmatrix_transposed(a, stage_at + row * (2 * kChannels) + swapped(row, v) * 16);
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        float d[4] = {};
#pragma unroll
        for (int i = 0; i < Parts; i++) mma_rows(d, a, b[i][nt], bfloat);
        add(part * (kChannels / 16) + m, nt, d);
      }
    }
  }
}

// Tokens [first, end), at most 16. `stage`: shared memory of the warp.
template <int DK, int DV, int NT, int Zeros>
__device__ __forceinline__ void row_step(const HalfQuery<DK, NT>& q, const RowMemory& keys, const RowMemory& values,
                                         int32_t first, int32_t end, const View<8 * NT>& view,
                                         const float (&factor)[2 * NT], float cap, bool bfloat, uint32_t lane, uint8_t* stage,
                                         HalfState<DV, NT, Zeros>& w) {
  constexpr int kColumns = 2 * NT;
  float sum[NT][4] = {}, s[2][kColumns];
  key_rows<DK, NT, 2>(q.rows[0], keys, first, end, bfloat, lane, sum);
  bool move = false;
  float most[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; j++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int32_t token = first + (int32_t)lane / 4 + 8 * h;
      s[h][j] = sum[j / 2][2 * h + j % 2] * factor[j];
      if (cap > 0) s[h][j] = soft_cap(s[h][j], cap);
      if (token >= end || !view.sees(HalfState<DV, NT, Zeros>::column(j, lane % 4), token)) s[h][j] = -kInfinity;
    }
    most[j] = fmaxf(s[0][j], s[1][j]);
    move |= most[j] - w.reference[j] > kLimitAbove;
  }
  if (__any_sync(kAllLanes, move)) {
    float one[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; j++) one[j] = 1;
    w.template move<false>(most, one);
  }
  uint32_t b[2][NT][2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      float x[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        x[j] = exp2_fast(s[h][2 * nt + j] - w.reference[2 * nt + j]);
        w.sum[2 * nt + j] += x[j];
      }
      uint32_t high = bfloat ? pack_bfloat2(x[0], x[1]) : pack_half2(x[0], x[1]);
      float r0 = x[0] - from_row_type((uint16_t)high, bfloat), r1 = x[1] - from_row_type((uint16_t)(high >> 16), bfloat);
      b[0][nt][h] = transpose(high);
      b[1][nt][h] = transpose(bfloat ? pack_bfloat2(r0, r1) : pack_half2(r0, r1));
    }
  }
  value_rows<DV, NT, 2>(values, first, end, b, bfloat, lane, stage, [&](int m, int nt, const float (&d)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) w.o[m][nt][i] += d[i];
  });
}

}  // namespace qkv
