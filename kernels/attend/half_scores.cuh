// Scores of a page's 64 tokens on the f16 path: codes are operand A as f16 subnormals, queries operand B. Step and min are
// applied to the sums of a group (per token), or to the queries before (per channel); nothing multiplies an element.
//
// Per channel, products r of query and step are rounded to f16 once for a group of tokens, so the error is theirs alike and grows with the
// codes' mean, as that of weights does (`half_values.cuh`). Here, too, codes count from their middle c:
// sum(r code) + [sum(query min) + c (sum(query step) - sum(r))], of which the part in brackets is the group's own.
//
// Lane 4g + t gets s[i][j]: token 16 (i / 2) + 8 (i mod 2) + g, its column j = 8 (j / 2) + 2t + j mod 2.
#pragma once
#include "half_query.cuh"
#include "pairs.cuh"
#include "places.cuh"
#include "state.cuh"

namespace qkv {

// Number of the pair of 32 channels, for groups that only the parameters tell.
__device__ __forceinline__ uint32_t pair_of(uint32_t group, uint32_t block) { return group >= 32 ? block * 32 / group : 0; }

// Queries that carry the steps of a per-channel group, and the zero term.
template <int D, int NT>
struct Folded {
  uint32_t q[NT][Dims<D>::kSteps][2];
  float zero[2 * NT];
  // Inverse of the queries' scale and of the power of two that the steps were multiplied with, so that products with the queries fit f16.
  float inverse;

  __device__ __forceinline__ void clear() { inverse = 1 / kChannelScale; }

  __device__ __forceinline__ bool plain() const { return inverse == 1 / kChannelScale; }

  // Makes the scale fit the lane's largest step; queries are below `kChannelScale`. Each group has its own: products with small steps
  // would lose bits to large ones seen before.
  __device__ __forceinline__ void choose(float largest) {
    largest = warp_max(largest);
    const float scale = largest < 2 ? 1.0f : from_bits((uint32_t)max(253 - (int)(bits_of(largest) >> 23), 97) << 23);
    inverse = inverse_power(scale * kChannelScale);
  }

  // The power of two, for two f16.
  __device__ __forceinline__ uint32_t factor() const {
    uint32_t h = float_to_half(inverse_power(inverse * kChannelScale));
    return h | h << 16;
  }

  // Products of queries and steps as they enter the tensor cores. `f`: `factor()`, made once a group.
  static __device__ __forceinline__ uint2 scaled(uint2 q, uint2 step, uint32_t f) {
    return make_uint2(mul_half2(q.x, mul_half2(step.x, f)), mul_half2(q.y, mul_half2(step.y, f)));
  }
};

// `steps`: where the lane's part of a group's steps begins; its mins lie 2 D bytes behind.
template <class F, int D, int NT>
__device__ __forceinline__ void fold_channels(const QkvAttend& p, const HalfQuery<D, NT>& q, const uint8_t* steps, uint32_t lane,
                                              Folded<D, NT>& out) {
  static_assert(D % 32 == 0);
  constexpr int kParts = D / 32;
  uint4 step[kParts];
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < kParts; i++) {
    step[i] = load_cached16(steps + 16 * i);
    any |= step[i].x | step[i].y;
    any |= step[i].z | step[i].w;
  }
  // Large steps are rare, here and in the group before. Those of 2 and more have this bit.
  if (__any_sync(kAllLanes, (any & 0x40004000) != 0 || !out.plain())) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kParts; i++) {
      most = max_half2(most, max_half2(max_half2(step[i].x, step[i].y), max_half2(step[i].z, step[i].w)));
    }
    out.choose(fmaxf(half_to_float((uint16_t)most), half_to_float((uint16_t)(most >> 16))));
    const uint32_t factor = out.factor();
#pragma unroll
    for (int i = 0; i < kParts; i++) {
      step[i] = make_uint4(mul_half2(step[i].x, factor), mul_half2(step[i].y, factor), mul_half2(step[i].z, factor),
                           mul_half2(step[i].w, factor));
    }
  }
  uint32_t minus_ones[4];
  q.minus_ones(minus_ones);
  // A lane's steps and mins are operand A as they are loaded: of 32 channels, rows 0 - 7 are right in products with the lower eight of
  // each 16, [0, 1], and rows 8 - 15 in those with the upper ones, [2, 3].
  auto add = [&](const uint4& x, const uint4& b, float (&low)[4], float (&high)[4]) {
    const uint32_t a[4] = {x.x, x.y, x.z, x.w}, lower[2] = {b.x, b.y}, upper[2] = {b.z, b.w};
    mma_f16(low, a, lower);
    mma_f16(high, a, upper);
  };
  auto mins = [&](int i) { return load_cached16(steps + 2 * D + 16 * i); };
  // Two tiles of columns have no registers for all sums at a time.
  constexpr bool kTogether = NT == 1;
  float low[NT][4] = {}, high[NT][4] = {}, min_low[NT][4] = {}, min_high[NT][4] = {};
#pragma unroll
  for (int i = 0; i < kParts; i++) {
    const uint4 v = step[i];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      const uint4 b = q.paired(nt, i, lane);
      add(v, b, low[nt], high[nt]);
      if constexpr (kTogether) add(mins(i), b, min_low[nt], min_high[nt]);
      uint32_t(&first)[2] = out.q[nt][2 * i], (&second)[2] = out.q[nt][2 * i + 1];
      first[0] = mul_half2(b.x, v.x), first[1] = mul_half2(b.z, v.y);
      second[0] = mul_half2(b.y, v.z), second[1] = mul_half2(b.w, v.w);
      mma_f16(low[nt], minus_ones, first);
      mma_f16(low[nt], minus_ones, second);
    }
  }
  const float unit = middle_code(F::kBits) * out.inverse;
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
#pragma unroll
    for (int j = 0; j < 2; j++) out.zero[2 * nt + j] = (low[nt][j] + high[nt][2 + j]) * unit;
  }
  if constexpr (!kTogether) {
    stay_below(p);
#pragma unroll
    for (int i = 0; i < kParts; i++) {
      const uint4 m = mins(i);
#pragma unroll
      for (int nt = 0; nt < NT; nt++) add(m, q.paired(nt, i, lane), min_low[nt], min_high[nt]);
    }
  }
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float& zero = out.zero[2 * nt + j];
      zero = fmaf(min_low[nt][j] + min_high[nt][2 + j], 1 / kChannelScale, zero);
    }
  }
}

// `codes`: the lane's first vector; `pairs`: its pairs. `fold` lives as long as the unit.
template <class F, int D, int NT>
__device__ __forceinline__ void half_scores(const QkvAttend& p, const HalfQuery<D, NT>& q, const uint8_t* codes,
                                            const uint8_t* pairs, uint32_t lane, Folded<D, NT>& fold,
                                            float (&s)[8][2 * NT]) {
  constexpr int kSteps = Dims<D>::kSteps, kTiles = slice_tiles<F, D>(4);
  using G = Groups<F, D>;
  constexpr bool kPerToken = F::kAffine && !F::kChannel;
  constexpr int kCount = kPerToken ? G::kCount : 1;
  static_assert(kCount <= 4, "a row's lanes hold its pairs");
  Slice<F, kTiles, D> slice;
  TokenPairs pair;
  const bool token_scale = F::kFp8 && p.format[0].granularity == QKV_SCALE_TOKEN_HEAD;
  if (kPerToken || token_scale) pair.load(pairs);
#pragma unroll
  for (int mt = 0; mt < 4; mt++) {
    if (kShort<F, kCount> && mt == 2) stay_below(p);
    if constexpr (F::kChannel) {
      if (mt == 0 || (mt == 2 && F::kGroup == 32)) {
        fold_channels<F, D, NT>(p, q, pairs + (mt == 0 ? 0 : 4 * D), lane, fold);
      }
    }
    if (mt % kTiles == 0) slice.load(codes, mt / kTiles);
    if constexpr (kPerToken) {
      // The zero terms of all groups.
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        float zero[4] = {};
#pragma unroll
        for (int i = 0; i < kZeroProducts<kCount>; i++) mma_f16_k8(zero, pair.bits[2 * mt], pair.bits[2 * mt + 1], q.zero[nt][i][lane]);
#pragma unroll
        for (int i = 0; i < 4; i++) s[2 * mt + i / 2][2 * nt + i % 2] = zero[i];
      }
    }
    float sum[NT][4];
#pragma unroll
    for (int kb = 0; kb < kSteps; kb++) {
      const bool first = kPerToken ? kb % (2 * G::kRun) == 0 : kb == 0;
      if (first) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++) sum[nt][0] = sum[nt][1] = sum[nt][2] = sum[nt][3] = 0;
      }
      uint32_t a[4];
      slice.fragment(mt % kTiles, kb, a);
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        if constexpr (F::kChannel) {
          mma_f16(sum[nt], a, fold.q[nt][kb]);
        } else {
          uint2 w = q.page[nt][kb][lane];
          uint32_t b[2] = {w.x, w.y};
          if constexpr (F::kBfloat) {
            uint2 l = q.page_low[nt][kb][lane];
            uint32_t bl[2] = {l.x, l.y};
            mma_bf16(sum[nt], a, b);
            mma_bf16(sum[nt], a, bl);
          } else {
            mma_f16(sum[nt], a, b);
          }
        }
      }
      if constexpr (kPerToken) {
        if (kb + 1 == kSteps || (kb + 1) % (2 * G::kRun) == 0) {
          float step[4] = {};
          mma_f16_k8(step, pair.bits[2 * mt], pair.bits[2 * mt + 1], q.key_pairs.of(lane, kb / 2 / G::kRun));
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float factor = step[2 * h] * power_of_two(-F::position(mt, h));
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
#pragma unroll
              for (int j = 0; j < 2; j++) {
                float& out = s[2 * mt + h][2 * nt + j];
                out = fmaf(sum[nt][2 * h + j], factor, out);
              }
            }
          }
        }
      }
    }
    if constexpr (!kPerToken) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        // Of 8-bit floats the queries' factor has the unit.
        const float scale = F::kChannel ? F::unit(mt, h) * fold.inverse : 1.0f;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#pragma unroll
          for (int j = 0; j < 2; j++) {
            float& out = s[2 * mt + h][2 * nt + j];
            out = F::kChannel ? fmaf(sum[nt][2 * h + j], scale, fold.zero[2 * nt + j]) : F::number(sum[nt][2 * h + j]);
          }
        }
      }
    }
  }
  if (token_scale) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
      for (int j = 0; j < 2 * NT; j++) s[i][j] *= from_bits(pair.bits[i]);
    }
  }
}

}  // namespace qkv
