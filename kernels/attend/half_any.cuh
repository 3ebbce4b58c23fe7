// Pages of any format on the f16 path, the format read at run time. Fragments are made one after another in a loop, in
// shared memory of the lane's own, and codes are shifted to bit 0, so that the code is small and the same for all. The formats
// that have kernels of their own take no such detour (`half_scores.cuh`, `half_values.cuh`).
#pragma once
#include "../layout.cuh"
#include "half_values.cuh"
#include "rows.cuh"

namespace qkv {

// A operand of tile mt and columns 16 kb ..: codes as f16 too small by 2^24, floats as they are (bf16 as bf16). Columns at
// or beyond `valid` are 0 for floats.
__device__ __forceinline__ uint4 any_fragment(const QkvFormat& f, const uint8_t* codes, uint32_t nb, uint32_t words, uint32_t mt,
                                              uint32_t kb, uint32_t lane, int valid) {
  const uint32_t index = mt * nb + kb;
  uint4 a;
  if (is_half(f.kind)) {
    a = load_stream16(codes + index * 512 + lane * 16);
  } else if (f.kind != QKV_KIND_AFFINE) {
    uint2 w = load_cached8(codes + word_byte(words, lane, 2 * index));
    if (f.kind == QKV_KIND_E5M2) {
      a = make_uint4(__byte_perm(w.x, 0, 0x1404), __byte_perm(w.y, 0, 0x1404), __byte_perm(w.x, 0, 0x3424),
                     __byte_perm(w.y, 0, 0x3424));
    } else {
      a = make_uint4(e4m3_to_half2((uint16_t)w.x), e4m3_to_half2((uint16_t)w.y), e4m3_to_half2((uint16_t)(w.x >> 16)),
                     e4m3_to_half2((uint16_t)(w.y >> 16)));
    }
  } else if (f.bits == 8) {
    uint2 w = load_cached8(codes + word_byte(words, lane, 2 * index));
    return make_uint4(w.x & 0x00ff00ff, w.y & 0x00ff00ff, w.x >> 8 & 0x00ff00ff, w.y >> 8 & 0x00ff00ff);
  } else if (f.bits == 3) {
    const uint32_t first = 3 * (mt / 4 * nb + kb), field = 2 * (mt % 4);
    auto word = [&](uint32_t i) { return __ldg((const uint32_t*)(codes + word_byte(words, lane, first + i))); };
    uint32_t x[2];
    if (field < 6) {
      uint32_t w = word(field / 2);
      x[0] = w & 0x07070707, x[1] = w >> 3 & 0x07070707;
    } else {
      uint32_t low = word(2);
      x[0] = (word(0) >> 5 & 0x06060606) | (low >> 6 & 0x01010101);
      x[1] = (word(1) >> 5 & 0x06060606) | (low >> 7 & 0x01010101);
    }
    return make_uint4(x[0] & 0x00ff00ff, x[1] & 0x00ff00ff, x[0] >> 8 & 0x00ff00ff, x[1] >> 8 & 0x00ff00ff);
  } else {
    // 4, 2 and 1 bits: 1, 2 and 4 tiles share a word.
    const uint32_t tiles = 4 / f.bits, shift = mt % tiles * 2 * f.bits, mask = ((1u << f.bits) - 1) * 0x00010001;
    uint32_t w = __ldg((const uint32_t*)(codes + word_byte(words, lane, mt / tiles * nb + kb))) >> shift;
    return make_uint4(w & mask, w >> f.bits & mask, w >> 8 & mask, w >> (8 + f.bits) & mask);
  }
  if (valid < QKV_TILE) {
    const int c = (int)(16 * kb + 2 * (lane % 4));
    uint32_t near = (c < valid ? 0xffff : 0) | (c + 1 < valid ? 0xffff0000 : 0);
    uint32_t far = (c + 8 < valid ? 0xffff : 0) | (c + 9 < valid ? 0xffff0000 : 0);
    a = make_uint4(a.x & near, a.y & near, a.z & far, a.w & far);
  }
  return a;
}

__device__ __forceinline__ void mma_any(float (&d)[4], const uint4& x, uint2 y, bool bfloat) {
  const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[2] = {y.x, y.y};
  if (bfloat) {
    mma_bf16(d, a, b);
  } else {
    mma_f16(d, a, b);
  }
}

// Fragments that a lane has in the warp's shared memory.
constexpr int kStagedFragments = 8, kFragmentBytes = kStagedFragments * 512;

// Where the fragments of a lane lie: 16 bytes of each of `kStagedFragments` rows of 512.
__device__ __forceinline__ uint4* staged(uint8_t* stage, uint32_t lane) { return (uint4*)stage + lane; }

struct AnyKeys {
  template <class Values, int DK, int DV>
  using Pages = AnyPlaces;
  template <int D>
  static constexpr int kRun = 1;
  template <int D>
  static constexpr int kGroups = 0;
  static constexpr bool kPaired = false;
  static constexpr float kScoreUnit = 1;

  template <int D, int NT>
  static __device__ __forceinline__ void scores(const QkvAttend& p, const HalfQuery<D, NT>& q, const AnyPlaces& at, uint32_t lane,
                                                uint8_t* stage, Folded<D, NT>& fold, float (&s)[8][2 * NT]) {
    constexpr int kSteps = Dims<D>::kSteps;
    const uint8_t *codes = at.page + p.at[0].codes, *pairs = at.page + p.at[0].pairs;
    const QkvFormat& f = p.format[0];
    const bool affine = f.kind == QKV_KIND_AFFINE, channel = affine && f.per_channel, token = affine && !channel;
    const bool bfloat = f.kind == QKV_KIND_BF16, scaled = !affine && f.granularity == QKV_SCALE_TOKEN_HEAD;
    const uint32_t g = lane / 4, t = lane % 4, count = (D + f.group - 1) / (affine ? f.group : D);
    const uint32_t words = lane_words(p.at[0]);
    const float unit = affine ? power_of_two(24) : 1.0f;
    uint4* a = staged(stage, lane);
    const uint8_t* steps = pairs;
    uint32_t factor = 0;
    // Of this page: nothing of it is kept for the next one.
#pragma unroll
    for (int j = 0; j < 2 * NT; j++) fold.zero[j] = 0;
#pragma unroll
    for (int mt = 0; mt < 4; mt++) {
      if (channel && (mt == 0 || (mt == 2 && f.group == 32))) {
        steps = pairs + (mt == 0 ? 0 : 4 * D);
        prepare(q, steps, (int)f.bits, lane, fold);
        factor = fold.factor();
      }
      float zero[NT][4];
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          zero[nt][i] = fold.zero[2 * nt + i % 2];
          s[2 * mt + i / 2][2 * nt + i % 2] = 0;
        }
      }
      // Two steps, 32 channels, at a time: a group has no fewer.
#pragma unroll 1
      for (int first = 0; first < kSteps; first += kStagedFragments) {
        const int steps_here = min(kSteps - first, kStagedFragments);
#pragma unroll 1
        for (int k = 0; k < steps_here; k++) {
          a[32 * k] = any_fragment(f, codes, kSteps, words, mt, first + k, lane, QKV_TILE);
        }
#pragma unroll 1
        for (int k = 0; k < steps_here; k += 2) {
          float sum[NT][4] = {};
          for (int kb = first + k; kb < first + min(k + 2, steps_here); kb++) {
            uint2 step = make_uint2(0, 0);
            if (channel) step = load_cached8(steps + t * (D / 2) + kb * 8);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
              uint2 b = q.page[nt][kb][lane];
              if (channel) b = fold.scaled(b, step, factor);
              mma_any(sum[nt], a[32 * (kb - first)], b, bfloat);
              if (bfloat) mma_any(sum[nt], a[32 * (kb - first)], q.page_low[nt][kb][lane], true);
            }
          }
          float scale[2] = {unit, unit};
          if (token) {
            const int block = (first + k) / 2;
            uint2 w = load_cached8(pairs + (g * count + pair_of(f.group, block)) * 32 + mt * 8);
            float step[4] = {};
            mma_f16_k8(step, w.x, w.y, q.key_pairs.of(lane, 0));
            scale[0] *= step[0], scale[1] *= step[2];
#pragma unroll
            for (int nt = 0; nt < NT; nt++) mma_f16_k8(zero[nt], w.x, w.y, q.zero[nt][block][lane]);
          }
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
              float& x = s[2 * mt + i / 2][2 * nt + i % 2];
              x = fmaf(sum[nt][i], scale[i / 2], x);
            }
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float scale = channel ? fold.inverse : 1.0f;
        if (scaled) scale = __ldg((const float*)(pairs + g * 32) + 2 * mt + h);
#pragma unroll
        for (int j = 0; j < 2 * NT; j++) {
          float& x = s[2 * mt + h][j];
          x = affine ? fmaf(x, scale, zero[j / 2][2 * h + j % 2]) : x * scale;
        }
      }
    }
  }

  // The scale of the queries for a per-channel group of codes of `bits`, and its zero terms.
  template <int D, int NT>
  static __device__ __forceinline__ void prepare(const HalfQuery<D, NT>& q, const uint8_t* steps, int bits, uint32_t lane,
                                                 Folded<D, NT>& fold) {
    constexpr int kSteps = Dims<D>::kSteps;
    steps += lane % 4 * (D / 2);
    uint32_t most = 0;
    // Sums of the queries' products with mins, in [0, 1], and with steps, in [2, 3]; and of these as f16, as they enter the tensor cores.
    float sums[NT][4] = {}, rounded[NT][4] = {};
#pragma unroll 1
    for (int kb = 0; kb < kSteps; kb++) {
      uint2 w = load_cached8(steps + kb * 8), m = load_cached8(steps + 2 * D + kb * 8);
      most = max_half2(most, max_half2(w.x, w.y));
#pragma unroll
      for (int nt = 0; nt < NT; nt++) mma_any(sums[nt], make_uint4(m.x, w.x, m.y, w.y), q.page[nt][kb][lane], false);
    }
    fold.choose(fmaxf(half_to_float((uint16_t)most), half_to_float((uint16_t)(most >> 16))));
    const uint32_t factor = fold.factor();
    const uint4 ones = make_uint4(0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00);
    // The same products as in `scores`, made here for their sums only.
#pragma unroll 1
    for (int kb = 0; kb < kSteps; kb++) {
      const uint2 step = load_cached8(steps + kb * 8);
#pragma unroll
      for (int nt = 0; nt < NT; nt++) mma_any(rounded[nt], ones, fold.scaled(q.page[nt][kb][lane], step, factor), false);
    }
    const float step_unit = 1 / (kChannelScale * fold.inverse), unit = middle_code(bits) * fold.inverse;
#pragma unroll
    for (int j = 0; j < 2 * NT; j++) {
      const float(&z)[4] = sums[j / 2];
      fold.zero[j] = fmaf(fmaf(z[2 + j % 2], step_unit, -rounded[j / 2][j % 2]), unit, z[j % 2] * (1 / kChannelScale));
    }
  }
};

struct AnyValues {
  // In a large head's kernel the lower parts of weights for bf16 pages lie in shared memory, which leaves a third block its registers.
  template <int D>
  static constexpr bool kPartsInShared = (D > 128);
  // What a warp's stage is used for: fragments, and behind them those parts.
  template <int D, int NT>
  static constexpr int kStageUsed = kFragmentBytes + (kPartsInShared<D> ? 1024 * NT : 0);
  template <int D>
  static constexpr int kZeros = Dims<D>::kBlocks;

  template <int D, int NT>
  static __device__ __forceinline__ void begin(const QkvAttend& p, uint8_t* stage, HalfState<D, NT, kZeros<D>>& w) {
    w.clear_zeros(stage + kStageUsed<D, NT>);
    const QkvFormat& f = p.format[1];
    if (f.kind == QKV_KIND_AFFINE && !f.per_channel) w.lift(25);
    if (f.kind != QKV_KIND_AFFINE && f.granularity == QKV_SCALE_TOKEN_HEAD) w.lift(90);
  }

  template <int D, int NT, class Query>
  static __device__ __forceinline__ void values(const QkvAttend& p, const Query& q, const AnyPlaces& at, uint32_t lane,
                                                const Tail& end, const float (&factor)[2 * NT], uint8_t* stage,
                                                float (&s)[8][2 * NT], HalfState<D, NT, kZeros<D>>& w) {
    const uint8_t *codes = at.page + p.at[1].codes, *pairs = at.page + p.at[1].pairs;
    const QkvFormat& f = p.format[1];
    const bool affine = f.kind == QKV_KIND_AFFINE, channel = affine && f.per_channel, token = affine && !channel;
    const bool bfloat = f.kind == QKV_KIND_BF16, scaled = !affine && f.granularity == QKV_SCALE_TOKEN_HEAD;
    const uint32_t g = lane / 4, count = token ? (D + f.group - 1) / f.group : 1;
    const uint32_t words = lane_words(p.at[1]);
    const int tail = end.whole ? QKV_TILE : end.tokens();
    uint4* a = staged(stage, lane);
    TokenPairs pair;
    auto load = [&](uint32_t j) {
      pair.load(pairs + (g * count + j) * 32);
      if (tail < QKV_TILE) pair.clear(g, tail);
    };
    float largest = 0;
    if (token) {
      // A row's lanes share its pairs.
      uint32_t most = 0;
#pragma unroll 1
      for (uint32_t i = lane % 4 * count; i < (lane % 4 + 1) * count; i++) {
        uint2 x = load_cached8(pairs + g * count * 32 + 8 * i);
        if ((int)(i % 4 * 16 + g) >= tail) x.x = 0;
        if ((int)(i % 4 * 16 + 8 + g) >= tail) x.y = 0;
        most = max_half2(most, max_half2(x.x, x.y));
      }
      largest = half_to_float((uint16_t)most);
      load(0);
    } else if (scaled) {
      load(0);
      largest = pair.most_float();
    }
    to_weights<D, NT>(factor, token || scaled, largest, s, w, [&] {
      // A lane whose pairs are all no numbers has no say. Those of other groups stay apart here.
      return largest == largest ? largest : 0.0f;
    });

    uint2 b[NT][4], low[NT][kPartsInShared<D> ? 1 : 4];
    auto low_part = [&](int nt, int kb) -> uint2& {
      if constexpr (kPartsInShared<D>) {
        return *((uint2*)(stage + kFragmentBytes) + lane + 32 * (4 * nt + kb));
      } else {
        return low[nt][kb];
      }
    };
    float total[2][NT][4] = {};
#pragma unroll
    for (int block = 0; block < Dims<D>::kBlocks; block++) {
      const bool next = block == 0 || (token && pair_of(f.group, block) != pair_of(f.group, block - 1));
      if (next) {
        float zero[2 * NT];
        if (token) w.load_zero(block, zero);
        if (token && block > 0) {
          load(pair_of(f.group, block));
#pragma unroll
          for (int nt = 0; nt < NT; nt++) total[0][nt][0] = total[0][nt][1] = total[1][nt][0] = total[1][nt][1] = 0;
        }
#pragma unroll
        for (int kb = 0; kb < 4; kb++) {
          float step[2] = {1, 1}, middle[2] = {0, 0};
          if (token) {
            pair.values(kb, q.value_pairs.of(lane, 0), step, middle);
          } else if (scaled) {
            step[0] = from_bits(pair.bits[2 * kb]), step[1] = from_bits(pair.bits[2 * kb + 1]);
          }
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
            uint32_t high[2], rest[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
              float x[2];
#pragma unroll
              for (int j = 0; j < 2; j++) {
                float weight = s[2 * kb + h][2 * nt + j], &z = zero[2 * nt + j];
                if (token) z = fmaf(weight, middle[h], z);
                x[j] = weight * step[h];
              }
              if (bfloat) {
                high[h] = pack_bfloat2(x[0], x[1]);
                rest[h] = pack_bfloat2(x[0] - from_bits(high[h] << 16), x[1] - from_bits(high[h] & 0xffff0000));
              } else {
                high[h] = pack_half2(x[0], x[1]);
                rest[h] = 0;
              }
            }
            b[nt][kb] = make_uint2(transpose(high[0]), transpose(high[1]));
            if (bfloat) low_part(nt, kb) = make_uint2(transpose(rest[0]), transpose(rest[1]));
            if (affine) {
              const uint32_t one = 0x3c003c00;
              mma_any(total[kb / 2][nt], make_uint4(one, one, one, one), b[nt][kb], false);
            }
          }
        }
        if (token) {
          // As in `half_values`.
          const float share = middle_code((int)f.bits) * -0.125f;
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
              float& z = zero[2 * nt + j];
              z = fmaf(total[0][nt][j] + total[1][nt][j], share, z);
            }
          }
          w.store_zero(block, zero);
        }
      }
      // Two tiles of 16 channels, four fragments each.
#pragma unroll 1
      for (int k = 0; k < kStagedFragments; k++) {
        uint32_t m = 2 * block + k / 4;
        if (m < D / 16) a[32 * k] = any_fragment(f, codes, 4, words, m, k % 4, lane, tail);
      }
#pragma unroll
      for (int m = 2 * block; m < 2 * block + 2 && m < D / 16; m++) {
        const uint4* tile = a + 32 * (4 * (m - 2 * block));
        if (channel) {
          channel_tile<D, NT>(f, tile, b, total, pairs + g * (D / 2) + m * 8, w.o[m]);
        } else {
#pragma unroll
          for (int kb = 0; kb < 4; kb++) {
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
              mma_any(w.o[m][nt], tile[32 * kb], b[nt][kb], bfloat);
              if (bfloat) mma_any(w.o[m][nt], tile[32 * kb], low_part(nt, kb), true);
            }
          }
        }
      }
    }
  }

  // 16 channels of a per-channel format: the sums of 32 or 64 tokens, then step and min of the channel.
  template <int D, int NT>
  static __device__ __forceinline__ void channel_tile(const QkvFormat& f, const uint4* tile, const uint2 (&b)[NT][4],
                                                      const float (&total)[2][NT][4], const uint8_t* pairs,
                                                      float (&o)[NT][4]) {
    const bool whole = f.group == 64;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sum[NT][4] = {};
#pragma unroll
      for (int kb = 2 * half; kb < 2 * half + 2; kb++) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++) mma_any(sum[nt], tile[32 * kb], b[nt][kb], false);
      }
      uint2 w = load_cached8(pairs + (whole ? 0 : half * 4 * D));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        uint32_t bits = i < 2 ? w.x : w.y;
        float step = half_to_float((uint16_t)bits) * power_of_two(24), min = half_to_float((uint16_t)(bits >> 16));
#pragma unroll
        for (int nt = 0; nt < NT; nt++) o[nt][i] = fmaf(sum[nt][i], step, fmaf(total[half][nt][i % 2], min, o[nt][i]));
      }
    }
  }

  template <int D, int NT>
  static __device__ __forceinline__ void finish(const QkvAttend& p, uint32_t head, uint32_t lane,
                                                HalfState<D, NT, kZeros<D>>& w) {
    const QkvFormat& f = p.format[1];
    const bool affine = f.kind == QKV_KIND_AFFINE, channel = affine && f.per_channel;
    float scale = affine && !channel ? power_of_two(24) : 1.0f;
    w.set_limit(kLimitAbove);
    if (p.scales[1]) scale *= __ldg((const float*)p.scales[1] + head);
    float zero[2 * NT] = {};
#pragma unroll
    for (int m = 0; m < D / 16; m++) {
      if (m % 2 == 0 && (m == 0 || pair_of(f.group, m / 2) != pair_of(f.group, m / 2 - 1))) {
        w.load_zero(m / 2, zero);
#pragma unroll
        for (int j = 0; j < 2 * NT; j++) zero[j] = rows_sum(zero[j]);
      }
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
#pragma unroll
        for (int i = 0; i < 4; i++) w.o[m][nt][i] = fmaf(w.o[m][nt][i], scale, zero[2 * nt + i % 2]);
      }
    }
    if (f.rotate) rotate_output<D>(w, f.rotate, lane);
  }
};

}  // namespace qkv
