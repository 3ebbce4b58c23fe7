// Output of a page on the f16 path: weights become operand B in f16, times the step of their token (per token); the transposed
// values' codes are operand A. Per channel, step and min are applied to a token group's sums.
//
// Per token, a product w of weight and step is rounded to f16, and many of them may round alike, as in attention that is nearly uniform.
// With mins beside it that error would grow with the codes' mean: sum(w code) + sum(weight min), whose parts nearly cancel. So codes
// count from their middle c: sum(w code) - c sum(w) + sum(weight (min + c step)), where the first sums take the same rounded w.
#pragma once
#include "half_scores.cuh"

namespace qkv {

// What a warp carries. o[m][nt]: channels 16m + g (registers 0, 1) and 16m + g + 8 (2, 3) of columns 8 nt + 2t and the next.
// `Zeros`: pairs of a token of which one lane keeps weighted mins.
//
// Where weights are multiplied with steps, the products have to fit f16, not the weights. So while pages are read references are
// lower by a lift L, such that no step is above 2^-L; it falls when one is.
template <int D, int NT, int Zeros>
struct HalfState {
  static constexpr int kColumns = 2 * NT;
  // Two tiles of columns, or many pairs, leave no registers for what can be made anew.
  static constexpr bool kKeepCheap = NT == 1 && Zeros < 4;
  float reference[kColumns], sum[kColumns];
  float o[D / 16][NT][4];
  // What a pair's channels get besides the codes' products: a part of it, the sum over lanes of equal t is all. Many of them lie in shared
  // memory while pages are read: the lane's from `zeros_at` on, which is set by `clear_zeros`.
  static constexpr bool kSharedZeros = Zeros >= 4;
  static constexpr int kSharedBytes = kSharedZeros ? Zeros * NT * 256 : 0;
  float zero[kSharedZeros || Zeros == 0 ? 1 : Zeros][kColumns];
  uint32_t zeros_at;
  // How far a score may be above the reference, 15 + L; and 2^-L, where it is kept.
  float limit, kept_step;

  // Number of the lane's column j in the unit, and its output of channel 16m + 8h + g.
  static __device__ __forceinline__ uint32_t column(int j, uint32_t t) { return 8 * (j / 2) + 2 * t + j % 2; }
  __device__ __forceinline__ float& at(int m, int j, int h) { return o[m][j / 2][2 * h + j % 2]; }

  __device__ __forceinline__ void clear() {
    limit = kLimitAbove, kept_step = 1;
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      reference[j] = kNoReference;
      sum[j] = 0;
    }
#pragma unroll
    for (int m = 0; m < D / 16; m++) {
#pragma unroll
      for (int nt = 0; nt < NT; nt++) o[m][nt][0] = o[m][nt][1] = o[m][nt][2] = o[m][nt][3] = 0;
    }
  }

  __device__ __forceinline__ float most_step() const { return kKeepCheap ? kept_step : exp2_fast(kLimitAbove - limit); }

  // Before pages. `memory`: `kSharedBytes` of the warp.
  __device__ __forceinline__ void clear_zeros(uint8_t* memory) {
    if constexpr (kSharedZeros) zeros_at = keep(shared_address(memory) + fresh_lane() * 8);
    const float none[kColumns] = {};
#pragma unroll
    for (int b = 0; b < Zeros; b++) store_zero(b, none);
  }

  __device__ __forceinline__ void load_zero(int b, float (&z)[kColumns]) const {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      if constexpr (kSharedZeros) {
        const float2 x = load_shared_pair(zeros_at + (b * NT + nt) * 256);
        z[2 * nt] = x.x, z[2 * nt + 1] = x.y;
      } else {
        z[2 * nt] = zero[b][2 * nt], z[2 * nt + 1] = zero[b][2 * nt + 1];
      }
    }
  }

  __device__ __forceinline__ void store_zero(int b, const float (&z)[kColumns]) {
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      if constexpr (kSharedZeros) {
        store_shared_pair(zeros_at + (b * NT + nt) * 256, make_float2(z[2 * nt], z[2 * nt + 1]));
      } else {
        zero[b][2 * nt] = z[2 * nt], zero[b][2 * nt + 1] = z[2 * nt + 1];
      }
    }
  }

  // A pair's channels are no numbers.
  __device__ __forceinline__ void spoil_zero(int b) {
    float z[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; j++) z[j] = from_bits(0x7fffffff);
    store_zero(b, z);
  }

  // Before pages: steps are taken for as small as that. Nothing has been summed.
  __device__ __forceinline__ void lift(int most) {
    limit = kLimitAbove + (float)most;
    kept_step = power_of_two(-most);
  }

  // Changes the lift.
  __device__ __forceinline__ void set_limit(float next) {
    float factor[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      factor[j] = exp2_fast(next - limit);
      reference[j] += limit - next;
    }
    scale<true>(factor);
    limit = next;
  }

  // Makes room for a step.
  __device__ __forceinline__ void fit(float step) {
    const int e = (int)(bits_of(step) >> 23);
    kept_step = from_bits((uint32_t)(e + 1) << 23);
    set_limit(kLimitAbove + (float)(126 - e));
  }

  // Moves the references of columns whose largest score `most`, which `factor` takes to log2 units, is far above: by the same test as
  // the one that called, so that no column moves because another one does. `Pages`: while pages are read.
  template <bool Pages>
  __device__ __forceinline__ void move(const float (&most)[kColumns], const float (&factor)[kColumns]) {
    float down[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      const float m = rows_max(most[j]);
      const float next =
          fmaf(m, factor[j], -reference[j]) > limit ? m * factor[j] - (limit - (kLimitAbove - kHeadroom)) : reference[j];
      down[j] = exp2_fast(reference[j] - next);
      reference[j] = next;
    }
    scale<Pages>(down);
  }

  template <bool Pages>
  __device__ __forceinline__ void scale(const float (&factor)[kColumns]) {
    if constexpr (Pages) {
#pragma unroll
      for (int b = 0; b < Zeros; b++) {
        float z[kColumns];
        load_zero(b, z);
#pragma unroll
        for (int j = 0; j < kColumns; j++) z[j] *= factor[j];
        store_zero(b, z);
      }
    }
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      sum[j] *= factor[j];
#pragma unroll
      for (int m = 0; m < D / 16; m++) {
        o[m][j / 2][j % 2] *= factor[j];
        o[m][j / 2][2 + j % 2] *= factor[j];
      }
    }
  }
};

// Scores, which `factor` takes to log2 units, become weights; references and the lift move where they must. `largest`: the
// lane's largest step, where weights are `scaled` by steps; if one is not a number, all lanes call `repair`, which does what has to be
// done about such pairs and returns the lane's largest step without them.
template <int D, int NT, int Zeros, class Repair>
__device__ __forceinline__ void to_weights(const float (&factor)[2 * NT], bool scaled, float largest, float (&s)[8][2 * NT],
                                           HalfState<D, NT, Zeros>& w, Repair repair) {
  bool grow = scaled && !(largest <= w.most_step());
  bool move = grow;
  float most[2 * NT];
#pragma unroll
  for (int j = 0; j < 2 * NT; j++) {
    most[j] = s[0][j];
#pragma unroll
    for (int i = 1; i < 8; i++) most[j] = fmaxf(most[j], s[i][j]);
    move |= fmaf(most[j], factor[j], -w.reference[j]) > w.limit;
  }
  if (__any_sync(kAllLanes, move)) {
    if (__any_sync(kAllLanes, grow)) {
      if (__any_sync(kAllLanes, largest != largest)) largest = repair();
      if (__any_sync(kAllLanes, largest > w.most_step())) w.fit(warp_max(largest));
    }
    w.template move<true>(most, factor);
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
#pragma unroll
    for (int j = 0; j < 2 * NT; j++) {
      s[i][j] = exp2_fast(fmaf(s[i][j], factor[j], -w.reference[j]));
      w.sum[j] += s[i][j];
    }
  }
}

// Before the pages of a unit.
template <class F, int D, int NT, int Zeros>
__device__ __forceinline__ void half_begin_pages(const QkvAttend& p, HalfState<D, NT, Zeros>& w) {
  // No pair has a smaller step than 2^-24, and a scale below 2^-90 may lose bits.
  if constexpr (F::kAffine && !F::kChannel) w.lift(25);
  if (F::kFp8 && p.format[1].granularity == QKV_SCALE_TOKEN_HEAD) w.lift(90);
}

// `codes`: the lane's first vector; `pairs`: its pairs. Behind the `tail` may lie anything. `s`: scores, which `factor` takes to log2
// units.
template <class F, int D, int NT, int Zeros, class Query>
__device__ __forceinline__ void half_values(const QkvAttend& p, const Query& q, const uint8_t* codes,
                                            const uint8_t* pairs, uint32_t lane, const Tail& tail, const float (&factor)[2 * NT],
                                            float (&s)[8][2 * NT], HalfState<D, NT, Zeros>& w) {
  // Floats of 8 bits are all loaded together: each slice asks for the tail, and registers are there.
  constexpr int kRows = D / 16, kTiles = F::kFp8 ? kRows : slice_tiles<F, QKV_TILE>(kRows);
  using G = Groups<F, D>;
  const uint32_t g = lane / 4, t = lane % 4;
  constexpr bool kPerToken = F::kAffine && !F::kChannel;
  static_assert(!kPerToken || G::kCount <= 4, "a row's lanes hold its pairs");
  const bool token_scale = F::kFp8 && p.format[1].granularity == QKV_SCALE_TOKEN_HEAD;

  TokenPairs pair;
  float largest = 0;
  if (kPerToken || token_scale) {
    pair.load(pairs);
    if (!tail.whole) pair.clear(g, tail.tokens());
    largest = kPerToken ? pair.template most_half<(G::kCount > 1)>() : pair.most_float();
  }
  to_weights<D, NT>(factor, kPerToken || token_scale, largest, s, w, [&] {
    if constexpr (kPerToken && G::kCount > 1) {
      // The channels of a group that is not a number are none; all others are what they are.
      const uint32_t none = pair.template take_out<G::kCount>();
#pragma unroll
      for (int j = 0; j < G::kCount; j++) {
        if (none >> j & 1) w.spoil_zero(j);
      }
      return pair.template most_half<false>();
    } else {
      return largest == largest ? largest : 0.0f;
    }
  });

  // Weights as operand B: [16 tokens][two halves].
  uint32_t b[NT][4][2], low[F::kBfloat ? NT : 1][4][2];
  auto pack = [&](int zeros) {
    uint32_t operand = 0;
    float zero[2 * NT];
    if constexpr (kPerToken) {
      operand = q.value_pairs.of(lane, zeros);
      w.load_zero(zeros, zero);
    }
#pragma unroll
    for (int kb = 0; kb < 4; kb++) {
      float step[2] = {1, 1}, middle[2] = {0, 0};
      if constexpr (kPerToken) {
        pair.values(kb, operand, step, middle);
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
          float x[2];
#pragma unroll
          for (int j = 0; j < 2; j++) {
            x[j] = s[2 * kb + h][2 * nt + j];
            if constexpr (kPerToken) {
              zero[2 * nt + j] = fmaf(x[j], middle[h], zero[2 * nt + j]);
            }
            if (kPerToken) x[j] *= step[h];
          }
          if constexpr (F::kBfloat) {
            uint32_t high = pack_bfloat2(x[0], x[1]);
            b[nt][kb][h] = transpose(high);
            float r0 = x[0] - from_bits(high << 16), r1 = x[1] - from_bits(high & 0xffff0000);
            low[nt][kb][h] = transpose(pack_bfloat2(r0, r1));
          } else {
            b[nt][kb][h] = transpose(pack_half2(x[0], x[1]));
          }
        }
      }
    }
    if constexpr (kPerToken) {
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        float sum[4] = {};
        uint32_t minus_ones[4];
        q.minus_ones(minus_ones);
#pragma unroll
        for (int kb = 0; kb < 4; kb++) mma_f16(sum, minus_ones, b[nt][kb]);
        // All eight lanes of a column have the sum.
#pragma unroll
        for (int j = 0; j < 2; j++) {
          zero[2 * nt + j] = fmaf(sum[j], middle_code(F::kBits) / 8, zero[2 * nt + j]);
        }
      }
      w.store_zero(zeros, zero);
    }
  };
  if constexpr (!kPerToken) {
    if (token_scale) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int j = 0; j < 2 * NT; j++) s[i][j] *= from_bits(pair.bits[i]);
      }
    }
    pack(0);
  }

  // Sums of the weights of 32 tokens, or in [1] of all, the same in all rows.
  float total[2][NT][4];
  constexpr bool halves = F::kChannel && F::kGroup == 32;
  if constexpr (F::kChannel) {
    const uint32_t ones[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
      for (int i = 0; i < 4; i++) total[0][nt][i] = 0;
      mma_f16(total[0][nt], ones, b[nt][0]);
      mma_f16(total[0][nt], ones, b[nt][1]);
#pragma unroll
      for (int i = 0; i < 4; i++) total[1][nt][i] = halves ? 0 : total[0][nt][i];
      mma_f16(total[1][nt], ones, b[nt][2]);
      mma_f16(total[1][nt], ones, b[nt][3]);
    }
  }

  Slice<F, kTiles, QKV_TILE> slice;
#pragma unroll
  for (int m = 0; m < kRows; m++) {
    if (kShort<F, G::kCount> && m > 0 && m % 2 == 0) stay_below(p);
    if (m % kTiles == 0) {
      slice.load(codes, m / kTiles);
      if constexpr (!F::kAffine) {
        if (!tail.whole) slice.clear_columns(tail.tokens(), t);
      }
    }
    if constexpr (kPerToken) {
      if (m % (2 * G::kRun) == 0) {
        constexpr int kChannels = 2 * G::kRun;
        pack(m / kChannels);
      }
    }
    if constexpr (F::kChannel) {
      float fresh[NT][4] = {};
      // Pairs of channels 16m + g and 16m + g + 8.
      auto fold = [&](int token_group, const float (&sums)[NT][4]) {
        uint2 pairs_of = load_cached8(pairs + token_group * (4 * D) + m * 8);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          uint32_t pair_bits = h ? pairs_of.y : pairs_of.x;
          float step = half_to_float((uint16_t)pair_bits) * F::unit(m, h);
          float min = half_to_float((uint16_t)(pair_bits >> 16));
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
              float& out = w.o[m][nt][2 * h + j];
              out = fmaf(fresh[nt][2 * h + j], step, fmaf(sums[nt][j], min, out));
            }
          }
        }
      };
#pragma unroll
      for (int kb = 0; kb < 4; kb++) {
        uint32_t a[4];
        slice.fragment(m % kTiles, kb, a);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) mma_f16(fresh[nt], a, b[nt][kb]);
        if (kb == 1 && halves) {
          fold(0, total[0]);
#pragma unroll
          for (int nt = 0; nt < NT; nt++) fresh[nt][0] = fresh[nt][1] = fresh[nt][2] = fresh[nt][3] = 0;
        }
      }
      fold(halves ? 1 : 0, total[1]);
    } else {
#pragma unroll
      for (int kb = 0; kb < 4; kb++) {
        uint32_t a[4];
        slice.fragment(m % kTiles, kb, a);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
          if constexpr (F::kBfloat) {
            mma_bf16(w.o[m][nt], a, b[nt][kb]);
            mma_bf16(w.o[m][nt], a, low[nt][kb]);
          } else {
            mma_f16(w.o[m][nt], a, b[nt][kb]);
          }
        }
      }
    }
  }
}

// Takes the output of the pages to plain units: undoes the lift and fields' positions, adds the weighted mins, rotates back.
template <class F, int D, int NT, int Zeros>
__device__ __forceinline__ void half_finish_pages(const QkvAttend& p, uint32_t head, uint32_t lane,
                                                  HalfState<D, NT, Zeros>& w) {
  constexpr bool kPerToken = F::kAffine && !F::kChannel;
  using G = Groups<F, D>;
  float scale = 1;
  w.set_limit(kLimitAbove);
  if constexpr (F::kFp8) {
    if (p.scales[1]) scale *= __ldg((const float*)p.scales[1] + head);
  }
  float zero[2 * NT] = {};
#pragma unroll
  for (int m = 0; m < D / 16; m++) {
    if constexpr (kPerToken) {
      if (m % (2 * G::kRun) == 0) {
        w.load_zero(m / 2 / G::kRun, zero);
#pragma unroll
        for (int j = 0; j < 2 * NT; j++) zero[j] = rows_sum(zero[j]);
      }
    }
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float factor = F::kChannel ? 1.0f : F::unit(m, i / 2);
        w.o[m][nt][i] = fmaf(F::number(w.o[m][nt][i]) * factor, scale, zero[2 * nt + i % 2]);
      }
    }
  }
  if (F::kAffine && p.format[1].rotate) rotate_output<D>(w, p.format[1].rotate, lane);
}

}  // namespace qkv
