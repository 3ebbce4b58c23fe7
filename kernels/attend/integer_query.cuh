// Queries on the integer path: fixed point of 16 bits in two signed bytes, q = step * (256 high + low). Column 2h of operand B is the
// high part of column h of the unit and 2h + 1 the low part, so lane 4g + t gets both sums of column t and joins them.
#pragma once
#include "pairs.cuh"
#include "places.cuh"
#include "state.cuh"

namespace qkv {

constexpr int kIntegerColumns = 4;

// Scores on the integer path are kept this much smaller, so that sums of a query fit f16 parts.
constexpr float kIntegerScale = 1.0f / 256;

// What only per-channel keys need of the queries, or only per-token ones.
template <int D, bool Channel>
struct IntegerPageQuery;

template <int D>
struct IntegerPageQuery<D, false> {
  // Signed bytes, 32 channels a step.
  uint2 page[(D + 31) / 32][32];
  // Operand B of 8 rows for each group of a token: odd columns get the group's step; even ones get a part of min * (sum of the rounded
  // query) of all groups, such that all products together have it.
  uint32_t pair[4][32];
};

template <int D>
struct IntegerPageQuery<D, true> {
  // Each warp's own queries, times its `IntegerFold::norm`: lane 4g + t has channels g + 8i of column t.
  float4 scaled[kWarps][(D + 31) / 32][32];
  // f16 high and low parts for the zero term: of 32 channels first those at x mod 16 < 8, then the others.
  uint2 zero_parts[(D + 31) / 32][2][32];
};

template <int D, bool Channel>
struct IntegerQuery : IntegerPageQuery<D, Channel> {
  static constexpr int kSteps = (D + 31) / 32;
  // Of values: they make mins and steps.
  PairOperands value_pairs;
  // High and low part in the type of exact rows.
  uint2 rows[Dims<D>::kRowSteps][32];
  // Raw scores to log2 units, for pages and rows; raw score of the keys' mean.
  float page_factor[kIntegerColumns], row_factor[kIntegerColumns], mean[kIntegerColumns];
};

// The power of two with which products of magnitude `most` become largest within 16-bit fixed point, that is below 32512 or so.
__device__ __forceinline__ float fixed_point_unit(float most) {
  // The carry of mantissas above 1.984 takes the exponent up.
  const int e = (int)((bits_of(most) + 0x20000) >> 23);
  return from_bits((uint32_t)min(max(254 + 14 - e, 1), 253) << 23);
}

// What per-channel queries are multiplied with before the first page tells a better factor: any product with a step is too large.
constexpr float kFirstNorm = 1.2676506e30f;

// 16-bit fixed point of |x| <= 32639: high and low signed byte.
__device__ __forceinline__ void split_bytes(float x, int8_t& high, int8_t& low) {
  int v = __float2int_rn(x);
  low = (int8_t)v;
  high = (int8_t)((v - low) >> 8);
}

// Column c of per-channel keys' queries, from a row whose largest magnitude `norm` takes below 1.
template <int D>
__device__ __forceinline__ void load_channel_query(const QueryRow<D>& row, float norm, uint32_t c, uint32_t lane,
                                                   IntegerQuery<D, true>& q) {
#pragma unroll
  for (int k = 0; k < Dims<D>::kBlocks; k++) {
    uint32_t channel = 32 * k + lane;
    if (channel >= D) break;
    float x = row.x[k] * norm;
#pragma unroll
    for (uint32_t w = 0; w < kWarps; w++) {
      ((float*)&q.scaled[w][k][4 * (lane % 8) + c])[lane / 8] = x * kFirstNorm;
    }
    // The mins of a lane are operand A as they are loaded: those of channels 8 apart lie in the rows of different halves.
    uint16_t h = float_to_half(x), *to = (uint16_t*)q.zero_parts[k][channel / 8 % 2];
    const uint32_t at = (channel % 8 / 2 * 2 + channel / 16 % 2) * 2 + channel % 2;
    to[4 * (4 * (2 * c)) + at] = h;
    to[4 * (4 * (2 * c + 1)) + at] = float_to_half(x - half_to_float(h));
  }
}

// Column c of per-token keys' queries in fixed point, `unit` times the row. `Run`: blocks of 32 channels of a group, of which
// there are J.
template <int Run, int J, int D>
__device__ __forceinline__ void load_token_query(const QueryRow<D>& row, float unit, uint32_t c, uint32_t lane,
                                                 IntegerQuery<D, false>& q) {
  constexpr int kBlocks = Dims<D>::kBlocks;
  float sum = 0, own = 0;
#pragma unroll
  for (int k = 0; k < kBlocks; k++) {
    uint32_t channel = 32 * k + lane;
    float x = row.x[k] * unit;
    int8_t high, low;
    split_bytes(x, high, low);
    if (channel < D) {
      // Bytes 0 .. 3 of a word are channels 16 kb + {2t, 2t + 8, 2t + 1, 2t + 9}; words of even and odd kb alternate.
      uint32_t in16 = channel % 16, t = in16 / 2 % 4, byte = in16 % 2 * 2 + in16 / 8, kb = channel / 16;
      int8_t* to = (int8_t*)q.page;
      to[((kb / 2 * 32 + 4 * (2 * c) + t) * 2 + kb % 2) * 4 + byte] = high;
      to[((kb / 2 * 32 + 4 * (2 * c + 1) + t) * 2 + kb % 2) * 4 + byte] = low;
    }
    sum += warp_sum((float)(256 * high + low));
    if ((k + 1) % Run == 0 || k + 1 == kBlocks) {
      // Lane t's group is t mod J.
      if (lane % J == k / Run) own = sum * kIntegerScale;
      sum = 0;
    }
  }
  // Lanes 4n + t: rows 2t (steps) and 2t + 1 (mins) of column n.
#pragma unroll
  for (int i = 0; i < J; i++) {
    if (lane < 4) {
      q.pair[i][4 * (2 * c) + lane] = zero_operand<J>(own, i, lane);
      q.pair[i][4 * (2 * c + 1) + lane] = lane == i ? float_to_half(kIntegerScale) : 0;
    }
  }
}

// `Channel`: keys are per channel. `Run`: blocks of 32 channels of a token's group, of which there are J.
template <bool Channel, int Run, int J, int D>
__device__ void load_query(const QkvAttend& p, const Unit& u, IntegerQuery<D, Channel>& q, uint32_t warp, uint32_t lane) {
  static_assert(D % 32 == 0 && kWarps == kIntegerColumns, "a warp has a column");
  const bool bfloat = p.window_dtype == QKV_BF16;
  const uint32_t c = warp;
  if (warp == 0) q.value_pairs.set(lane, min_factors(), kStepFactor);
  QueryRow<D> row;
  row.load(p, u, c, lane);
  float norm = normalizer(row.most());
#pragma unroll
  for (int k = 0; k < Dims<D>::kBlocks; k++) {
    float x = row.x[k] * norm;
    uint16_t h = to_row_type(x, bfloat), l = to_row_type(x - from_row_type(h, bfloat), bfloat);
    uint16_t* to = (uint16_t*)q.rows;
    to[row_place(32 * k + lane, 2 * c)] = h;
    to[row_place(32 * k + lane, 2 * c + 1)] = l;
  }
  float mean = 0;
  if (p.means) mean = row.dot((const uint16_t*)p.means + ((uint64_t)u.s.seat * p.heads + u.head) * D, lane);
  if (lane == 0) q.row_factor[c] = score_factor(p.scale, norm);
  row.rotate(p.format[0].rotate, lane);
  const float most = row.most();
  // A row that is not a number has no fixed point; its factor makes every score of it NaN.
  const bool nan = !__all_sync(kAllLanes, row.x[0] == row.x[0]);
  float factor, unit;
  if constexpr (Channel) {
    unit = normalizer(most);
    factor = score_factor(p.scale, unit);
    load_channel_query(row, unit, c, lane, q);
  } else {
    // A power of two, so that bf16 queries with a large element keep their other large ones exactly.
    unit = most > 0 ? fixed_point_unit(most) : 1.0f;
    factor = score_factor(p.scale, unit) / kIntegerScale;
    load_token_query<Run, J>(row, unit, c, lane, q);
    unit *= kIntegerScale;
  }
  if (lane == 0) {
    q.page_factor[c] = nan ? from_bits(0x7fffffff) : factor;
    q.mean[c] = mean * unit;
  }
}

}  // namespace qkv
