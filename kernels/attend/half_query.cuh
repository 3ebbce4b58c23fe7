// Queries on the f16 path, prepared once for all items of a unit.
#pragma once
#include "pairs.cuh"
#include "query.cuh"

namespace qkv {

// Queries for per-channel keys are this much larger, so that products with steps stay normal f16 numbers.
constexpr float kChannelScale = 16384;

// Those for per-token keys are larger by 2^12, and so are steps as they are made of pairs: together they undo the codes' 2^-24.
constexpr float kTokenScale = 4096;
constexpr uint32_t kTokenStepFactor = 0x6c00;

// The queries in shared memory.
template <int D, int NT>
struct HalfQuery {
  // f16 for pages, times `kChannelScale` or `kTokenScale`; bf16 pages: the bf16 high and low parts. Where all keys are per channel, two
  // steps lie side by side (`paired`).
  uint2 page[NT][Dims<D>::kSteps][32];
  uint2 page_low[NT][Dims<D>::kSteps][32];
  // High and low part in the type of exact rows.
  uint2 rows[2][NT][Dims<D>::kRowSteps][32];
  // B operands of 8 rows that make min * (sum of the queries of a group) of (step, min) pairs.
  uint32_t zero[NT][Dims<D>::kBlocks][32];
  // Of keys, which make steps, and of values, which make steps and middles; an operand A of -1.
  PairOperands key_pairs, value_pairs;
  alignas(16) uint32_t minus_one[4];

  __device__ __forceinline__ void minus_ones(uint32_t (&a)[4]) const { load_shared16(a, shared_address(minus_one)); }

  // Operands B of steps 2i and 2i + 1: the lower halves of both, then the upper ones.
  __device__ __forceinline__ uint4 paired(int nt, int i, uint32_t lane) const { return ((const uint4*)page[nt][2 * i])[lane]; }

  // Raw scores to log2 units, for pages and rows; raw score of the keys' mean.
  float page_factor[8 * NT], row_factor[8 * NT], mean[8 * NT];
};

// `Run`: blocks of 32 channels of a group. `J`: groups of a token, if the kernel knows: 0 says that `zero` has an operand for each run.
// `Paired`: steps lie in pairs. `unit`: what a sum of products with the keys' numbers has to be multiplied with.
template <int Run, int J, bool Paired, int D, int NT>
__device__ void load_query(const QkvAttend& p, const Unit& u, HalfQuery<D, NT>& q, float unit, uint32_t warp, uint32_t lane) {
  constexpr int kBlocks = Dims<D>::kBlocks;
  const QkvFormat& f = p.format[0];
  const bool bfloat_rows = p.window_dtype == QKV_BF16, bfloat_pages = f.kind == QKV_KIND_BF16;
  const float larger = J > 0 ? kTokenScale : f.kind == QKV_KIND_AFFINE && f.per_channel ? kChannelScale : 1.0f;
  if (warp == 0) {
    const uint32_t step = J > 0 ? kTokenStepFactor : kStepFactor;
    q.key_pairs.set(lane, step, step);
    const QkvFormat& v = p.format[1];
    q.value_pairs.set(lane, min_factors(v.kind == QKV_KIND_AFFINE ? middle_code_half((int)v.bits) : 0), kStepFactor);
    if (lane < 4) q.minus_one[lane] = 0xbc00bc00;
  }
  float key_scale = p.scales[0] ? __ldg((const float*)p.scales[0] + u.head) : 1.0f;
  for (uint32_t c = warp; c < 8 * NT; c += kWarps) {
    uint32_t n = c % 8;
    QueryRow<D> row;
    row.load(p, u, c, lane);
    float norm = normalizer(row.most());
    uint16_t* high = (uint16_t*)q.rows[0][c / 8];
    uint16_t* low = (uint16_t*)q.rows[1][c / 8];
#pragma unroll
    for (int k = 0; k < kBlocks; k++) {
      float x = row.x[k] * norm;
      uint16_t h = to_row_type(x, bfloat_rows);
      uint32_t at = row_place(32 * k + lane, n);
      high[at] = h;
      low[at] = to_row_type(x - from_row_type(h, bfloat_rows), bfloat_rows);
    }
    float mean = 0;
    if (p.means) mean = row.dot((const uint16_t*)p.means + ((uint64_t)u.s.seat * p.heads + u.head) * D, lane);
    if (lane == 0) q.row_factor[c] = score_factor(p.scale, norm);
    row.rotate(f.rotate, lane);
    norm = normalizer(row.most());
    uint16_t* page = (uint16_t*)q.page[c / 8];
    uint16_t* page_low = (uint16_t*)q.page_low[c / 8];
    float sum = 0, own = 0;
#pragma unroll
    for (int k = 0; k < kBlocks; k++) {
      float x = row.x[k] * norm * larger;
      uint16_t h = to_row_type(x, bfloat_pages);
      uint32_t channel = 32 * k + lane;
      if (channel < D) {
        page[Paired ? paired_place(channel, n) : page_place(channel, n)] = h;
        if (bfloat_pages) page_low[page_place(channel, n)] = float_to_bfloat(x - bfloat_to_float(h));
      }
      // The zero term belongs to the queries as they are multiplied: rounded.
      sum += warp_sum(bfloat_pages ? 0.0f : half_to_float(h));
      if ((k + 1) % Run == 0 || k + 1 == kBlocks) {
        if constexpr (J > 0) {
          // Lane t's group is t mod J.
          if (lane % J == k / Run) own = sum / kTokenScale;
        } else if (lane < 4) {
          q.zero[c / 8][k / Run][4 * n + lane] = zero_operand<1>(sum, 0, lane);
        }
        sum = 0;
      }
    }
    if constexpr (J > 0) {
#pragma unroll
      for (int i = 0; i < kZeroProducts<J>; i++) {
        if (lane < 4) q.zero[c / 8][i][4 * n + lane] = zero_operand<J>(own, i, lane);
      }
    }
    if (lane == 0) {
      // A softcap divides by it.
      q.page_factor[c] = fmaxf(score_factor(p.scale, norm) * (key_scale * unit), kLeastFactor);
      q.mean[c] = mean * norm;
    }
  }
}

}  // namespace qkv
