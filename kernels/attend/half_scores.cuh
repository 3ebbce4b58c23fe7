// Scores of a page's 64 tokens on the f16 path: codes are operand A as f16 subnormals, queries operand B. Step and min are
// applied to the sums of a group (per token), or to the queries before (per channel); nothing multiplies an element.
//
// Lane 4g + t gets s[i][j]: token 16 (i / 2) + 8 (i mod 2) + g, its column j = 8 (j / 2) + 2t + j mod 2.
#pragma once
#include "half_query.cuh"
#include "pairs.cuh"
#include "state.cuh"

namespace qkv {

// Number of the pair of 32 channels, for groups that only the parameters tell.
__device__ __forceinline__ uint32_t pair_of(uint32_t group, uint32_t block) { return group >= 32 ? block * 32 / group : 0; }

template <class F, int D>
struct Groups {
  // Blocks of 32 channels that are summed before a pair is applied, and pairs of a token.
  static constexpr int kRun = F::kGroup < 32 ? 1 : F::kGroup / 32;
  static constexpr int kBlocks = Dims<D>::kBlocks;
  static constexpr int kCount = (kBlocks + kRun - 1) / kRun;
};

// Queries that carry the steps of a per-channel group, and their scale.
template <int D, int NT>
struct Folded {
  uint32_t q[NT][Dims<D>::kSteps][2];
  float zero[2 * NT];
  // Power of two that the queries were multiplied with so that products with the steps fit f16, and its inverse.
  float scale, inverse;

  // As large as queries below 1 may become.
  __device__ __forceinline__ void clear() { scale = 16384, inverse = 1.0f / 16384; }

  // Makes the scale fit the lane's largest step; queries are below 1.
  __device__ __forceinline__ void choose(float largest) {
    if (!__any_sync(kAllLanes, largest * scale > 32768.0f)) return;
    largest = warp_max(largest);
    int e = (int)(bits_of(largest) >> 23) - 127;
    // Scaled queries stay within f16 by themselves.
    e = min(max(10 - e, -14), 14);
    scale = from_bits((uint32_t)(127 + e) << 23);
    inverse = from_bits((uint32_t)(127 - e) << 23);
  }
};

template <class F, int D, int NT>
__device__ __forceinline__ void fold_channels(const HalfQuery<D, NT>& q, const uint8_t* steps, uint32_t lane,
                                              Folded<D, NT>& out) {
  constexpr int kSteps = Dims<D>::kSteps;
  uint2 step[kSteps], mins[kSteps];
  load_channels<D>(steps, lane % 4, step);
  load_channels<D>(steps + 2 * D, lane % 4, mins);
  uint32_t most = 0;
#pragma unroll
  for (int kb = 0; kb < kSteps; kb++) most = max_half2(most, max_half2(step[kb].x, step[kb].y));
  float largest = fmaxf(half_to_float((uint16_t)most), half_to_float((uint16_t)(most >> 16)));
  out.choose(largest);
  uint32_t factor = float_to_half(out.scale);
  factor |= factor << 16;
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    float z[4] = {};
#pragma unroll
    for (int kb = 0; kb < kSteps; kb++) {
      uint2 b = q.page[nt][kb][lane];
      const uint32_t a[4] = {mins[kb].x, mins[kb].x, mins[kb].y, mins[kb].y}, qb[2] = {b.x, b.y};
      mma_f16(z, a, qb);
      out.q[nt][kb][0] = mul_half2(mul_half2(b.x, factor), step[kb].x);
      out.q[nt][kb][1] = mul_half2(mul_half2(b.y, factor), step[kb].y);
    }
    out.zero[2 * nt] = z[0];
    out.zero[2 * nt + 1] = z[1];
  }
}

// `pairs`: the section of the page; `fold` lives as long as the unit.
template <class F, int D, int NT>
__device__ __forceinline__ void half_scores(const QkvAttend& p, const HalfQuery<D, NT>& q, const uint8_t* codes,
                                            const uint8_t* pairs, uint32_t lane, Folded<D, NT>& fold,
                                            float (&s)[8][2 * NT]) {
  constexpr int kSteps = Dims<D>::kSteps, kTiles = slice_tiles<F, D>(4);
  using G = Groups<F, D>;
  const uint32_t g = lane / 4, t = lane % 4;
  constexpr uint32_t count = F::kAffine && !F::kChannel ? G::kCount : 1;
  Slice<F, kTiles, D> slice;
  TokenPairs pair[count];
  const bool token_scale = F::kFp8 && p.format[0].granularity == QKV_SCALE_TOKEN_HEAD;
  if constexpr (F::kAffine && !F::kChannel) {
#pragma unroll
    for (int j = 0; j < (int)count; j++) pair[j].load(pairs + (g * count + j) * 32, g);
  } else if (token_scale) {
    pair[0].load(pairs + g * 32, g);
  }
#pragma unroll
  for (int mt = 0; mt < 4; mt++) {
    if (mt % kTiles == 0) slice.load(codes, lane, mt / kTiles);
    if constexpr (F::kChannel) {
      if (mt == 0 || (mt == 2 && F::kGroup == 32)) {
        fold_channels<F, D, NT>(q, pairs + (mt == 0 ? 0 : 4 * D), lane, fold);
      }
    }
    float zero[NT][4];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      float m0 = F::kAffine && !F::kChannel ? q.mean[8 * nt + 2 * t] : 0.0f;
      float m1 = F::kAffine && !F::kChannel ? q.mean[8 * nt + 2 * t + 1] : 0.0f;
      zero[nt][0] = zero[nt][2] = m0, zero[nt][1] = zero[nt][3] = m1;
#pragma unroll
      for (int j = 0; j < 2; j++) s[2 * mt][2 * nt + j] = s[2 * mt + 1][2 * nt + j] = 0;
    }
    float sum[NT][4];
#pragma unroll
    for (int kb = 0; kb < kSteps; kb++) {
      const bool first = F::kAffine && !F::kChannel ? kb % (2 * G::kRun) == 0 : kb == 0;
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
      if constexpr (F::kAffine && !F::kChannel) {
        if (kb + 1 == kSteps || (kb + 1) % (2 * G::kRun) == 0) {
          const int block = kb / 2;
          const uint32_t(&w)[8] = pair[block / G::kRun].bits;
          float step[4] = {};
          mma_f16_k8(step, w[2 * mt], w[2 * mt + 1], step_operand(lane));
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
            mma_f16_k8(zero[nt], w[2 * mt], w[2 * mt + 1], q.zero[nt][block / G::kRun][lane]);
#pragma unroll
            for (int h = 0; h < 2; h++) {
              float factor = step[2 * h] * power_of_two(F::kScale - F::position(mt, h));
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
    // What is left: the zero term, one scale of a token, or nothing.
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float scale = power_of_two(F::kScale - F::position(mt, h));
      if constexpr (F::kChannel) scale *= fold.inverse;
      if constexpr (F::kFp8) {
        if (token_scale) scale *= from_bits(pair[0].bits[2 * mt + h]);
      }
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float& out = s[2 * mt + h][2 * nt + j];
          if constexpr (F::kChannel) {
            out = fmaf(sum[nt][2 * h + j], scale, fold.zero[2 * nt + j]);
          } else if constexpr (F::kAffine) {
            out += zero[nt][2 * h + j];
          } else {
            out = sum[nt][2 * h + j] * scale;
          }
        }
      }
    }
  }
}

}  // namespace qkv
