// Queries on the integer path: fixed point of 16 bits in two signed bytes, q = step * (256 high + low). Column 2h of operand B is the
// high part of column h of the unit and 2h + 1 the low part, so lane 4g + t gets both sums of column t and joins them.
#pragma once
#include "codes.cuh"
#include "state.cuh"

namespace qkv {

constexpr int kIntegerColumns = 4;

// Scores on the integer path are kept this much smaller, so that sums of a query fit f16 parts.
constexpr float kIntegerScale = 1.0f / 256;

template <int D>
struct IntegerQuery {
  static constexpr int kSteps = (D + 31) / 32;
  // Signed bytes, 32 channels a step.
  uint2 page[kSteps][32];
  // Per-channel keys: q itself (columns 8 banks apart, since the lanes of a warp read 8 channels of four), and f16 high and low parts of it (divided by its largest magnitude) for the zero term.
  float plain[kIntegerColumns][D + 8];
  uint2 zero_parts[D / 16][32];
  // Operand B of 8 rows: even columns get min * (sum of the rounded query), odd ones the step; for each group of a token.
  uint32_t pair[4][32];
  // High and low part in the type of exact rows.
  uint2 rows[Dims<D>::kRowSteps][32];
  // Raw scores to log2 units, for pages and rows; raw score of the keys' mean; what zero parts were divided by.
  float page_factor[kIntegerColumns], row_factor[kIntegerColumns], mean[kIntegerColumns], norm[kIntegerColumns];
};

// 16-bit fixed point of |x| <= 32639: high and low signed byte.
__device__ __forceinline__ void split_bytes(float x, int8_t& high, int8_t& low) {
  int v = __float2int_rn(x);
  low = (int8_t)v;
  high = (int8_t)((v - low) >> 8);
}

// `Channel`: keys are per channel. `Run`, `Count`: blocks of 32 channels of a group, and groups of a token.
template <bool Channel, int Run, int Count, int D>
__device__ void load_query(const QkvAttend& p, const Unit& u, IntegerQuery<D>& q, uint32_t warp, uint32_t lane) {
  constexpr int kBlocks = Dims<D>::kBlocks;
  const QkvFormat& f = p.format[0];
  const bool bfloat = p.window_dtype == QKV_BF16;
  const uint32_t c = warp;
  static_assert(kWarps == kIntegerColumns, "a warp has a column");
  QueryRow<D> row;
  row.load(p, u, c, lane);
  float norm = normalizer(row.most());
#pragma unroll
  for (int k = 0; k < kBlocks; k++) {
    float x = row.x[k] * norm;
    uint16_t h = to_row_type(x, bfloat), l = to_row_type(x - from_row_type(h, bfloat), bfloat);
    uint16_t* to = (uint16_t*)q.rows;
    to[row_place(32 * k + lane, 2 * c)] = h;
    to[row_place(32 * k + lane, 2 * c + 1)] = l;
  }
  float mean = 0;
  if (p.means) mean = row.dot((const uint16_t*)p.means + ((uint64_t)u.s.seat * p.heads + u.head) * D, lane);
  if (lane == 0) q.row_factor[c] = score_factor(p.scale, norm);
  row.rotate(f.rotate, lane);
  norm = normalizer(row.most());
  if constexpr (Channel) {
#pragma unroll
    for (int k = 0; k < kBlocks; k++) {
      uint32_t channel = 32 * k + lane;
      if (channel >= D) break;
      float x = row.x[k] * norm;
      q.plain[c][channel] = x;
      uint16_t h = float_to_half(x);
      uint16_t* to = (uint16_t*)q.zero_parts;
      to[page_place(channel, 2 * c)] = h;
      to[page_place(channel, 2 * c + 1)] = float_to_half(x - half_to_float(h));
    }
    if (lane == 0) q.page_factor[c] = score_factor(p.scale, norm);
    return;
  }
  // The step is a power of two, so that bf16 queries with a large element keep their other large ones exactly.
  float unit = norm * 32512.0f;
  unit = from_bits(bits_of(unit) & 0xff800000);
  float sum = 0;
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
      if (D % 32 != 0 && channel >= D - 16) {
        to[((kb / 2 * 32 + 4 * (2 * c) + t) * 2 + 1) * 4 + byte] = 0;
        to[((kb / 2 * 32 + 4 * (2 * c + 1) + t) * 2 + 1) * 4 + byte] = 0;
      }
    }
    sum += warp_sum((float)(256 * high + low));
    if ((k + 1) % Run == 0 || k + 1 == kBlocks) {
      // Lanes 4n + t: rows 2t (steps) and 2t + 1 (mins) of column n. The sum comes in three f16 parts.
      if (lane < 4) {
        float rest = sum * kIntegerScale;
        uint16_t part = 0;
        for (uint32_t i = 0; i <= lane; i++) {
          part = float_to_half(rest);
          rest -= half_to_float(part);
        }
        q.pair[k / Run][4 * (2 * c) + lane] = lane < 3 ? (uint32_t)part << 16 : 0;
        q.pair[k / Run][4 * (2 * c + 1) + lane] = lane == 0 ? float_to_half(kIntegerScale) : 0;
      }
      sum = 0;
    }
  }
  // A row that is not a number has no fixed point; its factor makes every score of it NaN.
  bool nan = !__all_sync(kAllLanes, row.x[0] == row.x[0]);
  if (lane == 0) {
    float factor = score_factor(p.scale, unit) / kIntegerScale;
    q.page_factor[c] = nan ? from_bits(0x7fffffff) : factor;
    q.mean[c] = mean * unit * kIntegerScale;
  }
}

}  // namespace qkv
