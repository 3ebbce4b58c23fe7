// Decode attention on the integer path: up to 4 columns (query, head) of a kv head, affine formats. Codes are the unsigned 8-bit operand
// of the tensor cores as they are stored, so a mask is all that a word costs; queries and weights are 16-bit fixed point in two
// bytes; sums of a tile are exact.
#pragma once
#include "integer_query.cuh"
#include "rows.cuh"

namespace qkv {

// A operand of tile mt and step k of 32 columns, of `kBlocks` times 16 columns.
template <class F, int Tiles, int Columns>
__device__ __forceinline__ void integer_fragment(Slice<F, Tiles, Columns>& slice, int mt, int k, uint32_t (&a)[4]) {
  constexpr int kBlocks = Columns / 16;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int kb = 2 * k + half;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint32_t& x = a[2 * half + h];
      if (kb >= kBlocks) {
        x = 0;
        continue;
      }
      int at = F::kWords * (mt / F::kTiles * kBlocks + kb);
      int f = 2 * (mt % F::kTiles) + h;
      if constexpr (F::kBits == 8) {
        x = slice.word(at + h);
      } else if constexpr (F::kBits == 3) {
        if (f < 6) {
          x = slice.word(at + f / 2) & 0x07070707u << (3 * (f % 2));
        } else {
          x = (slice.word(at + f - 6) & 0xc0c0c0c0) | (slice.word(at + 2) >> (f - 5) & 0x20202020);
        }
      } else {
        x = slice.word(at) & (0x01010101u * ((1u << F::kBits) - 1)) << F::position(mt, h);
      }
    }
  }
}

__device__ __forceinline__ float join(int high, int low) { return (float)(256 * high + low); }

// What a warp carries: o[m][h] is channel 16m + 8h + g of column t.
template <int D, int Zeros>
struct IntegerState {
  static constexpr int kColumns = 1;
  float reference[1], sum[1];
  float o[D / 16][2];
  // Weighted mins of a pair's channels, this lane's tokens only.
  float zero[Zeros];

  static __device__ __forceinline__ uint32_t column(int, uint32_t t) { return t; }
  __device__ __forceinline__ float& at(int m, int, int h) { return o[m][h]; }

  __device__ __forceinline__ void clear() {
    reference[0] = kNoReference;
    sum[0] = 0;
#pragma unroll
    for (int i = 0; i < Zeros; i++) zero[i] = 0;
#pragma unroll
    for (int m = 0; m < D / 16; m++) o[m][0] = o[m][1] = 0;
  }

  // Moves the reference of a column whose largest score `most`, which `factor` takes to log2 units, is far above: by the same test as
  // the one that called, so that no column moves because another one does.
  __device__ __forceinline__ void move(float most, float factor) {
    most = rows_max(most);
    float next = fmaf(most, factor, -reference[0]) > kLimitAbove ? most * factor - kHeadroom : reference[0];
    float down = exp2_fast(reference[0] - next);
    reference[0] = next;
    sum[0] *= down;
#pragma unroll
    for (int i = 0; i < Zeros; i++) zero[i] *= down;
#pragma unroll
    for (int m = 0; m < D / 16; m++) o[m][0] *= down, o[m][1] *= down;
  }
};

// Queries that carry the steps of a per-channel group. `norm`: the power of two that the queries in shared memory were multiplied
// with so that products with steps use 16 bits; it changes when one would not fit. `again`: bits above these 16 where it is so small that
// the next group has to look for a larger one.
template <int D>
struct IntegerFold {
  uint32_t q[(D + 31) / 32][2];
  uint32_t again;
  float norm, zero;

  __device__ __forceinline__ void clear() { norm = kFirstNorm, again = 0; }
};

// The most that a channel whose products fill 16 bits may add to a score, in log2 units, before each group looks for a norm of its own:
// pages with small steps could see what products are rounded by then.
constexpr float kWideChannel = 8.0f;

// `steps`, `mins`: where the lane's part of a group's steps and mins begins. A lane (g, t) has channels g + 8i of column t; they lie
// in the steps of pair g / 2 of channels, and `half` picks them.
template <class F, int D>
__device__ __forceinline__ void fold_channels(IntegerQuery<D, true>& q, const uint8_t* steps, const uint8_t* mins, uint32_t half,
                                              uint32_t warp, uint32_t lane, IntegerFold<D>& fold) {
  constexpr int kSteps = D / 16;
  float s[2 * kSteps];
  uint32_t step[2 * kSteps], min[2 * kSteps];
  load_channels<D>(steps, step);
  load_channels<D>(mins, min);
#pragma unroll
  for (int i = 0; i < kSteps; i++) {
    const uint32_t w = __byte_perm(step[2 * i], step[2 * i + 1], half);
    s[2 * i] = half_to_float((uint16_t)w);
    s[2 * i + 1] = half_to_float((uint16_t)(w >> 16));
  }
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
    uint32_t outside = fold.again;
#pragma unroll
    for (int i = 0; i < kSteps; i += 2) {
      const float4 v = q.scaled[warp][i / 2][lane];
      const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 2; j++) {
        // 2^23 + 2^15 + 2^7: within range the upper 16 bits are those of 2^23, and both bytes are too large by 128.
        uint32_t y = bits_of(fmaf(s[2 * (i + j)], x[2 * j], 8388608.0f + 32896.0f));
        uint32_t z = bits_of(fmaf(s[2 * (i + j) + 1], x[2 * j + 1], 8388608.0f + 32896.0f));
        outside |= (y ^ 0x4b000000) | (z ^ 0x4b000000);
        fold.q[i / 2][j] = transpose(__byte_perm(y, z, 0x4051) ^ 0x80808080);
      }
    }
    if (!__any_sync(kAllLanes, outside >> 16 != 0) || pass == 1) break;
    // Only a column's own products change its factor.
    const bool own = __ballot_sync(kAllLanes, outside >> 16 != 0) & 0x11111111u << lane % 4;
    float most = 0;
#pragma unroll
    for (int i = 0; i < kSteps; i += 2) {
      const float4 x = q.scaled[warp][i / 2][lane];
      most = fmaxf(most, fmaxf(fabsf(s[2 * i] * x.x), fabsf(s[2 * i + 1] * x.y)));
      most = fmaxf(most, fmaxf(fabsf(s[2 * i + 2] * x.z), fabsf(s[2 * i + 3] * x.w)));
    }
    most = rows_max(most);
    float factor = own && most > 0 ? fminf(fixed_point_unit(most), kFirstNorm * inverse_power(fold.norm)) : 1.0f;
    // Two bits less are no reason for a second pass.
    if (factor <= 4 && factor > 1) factor = 1;
    if (!__any_sync(kAllLanes, factor != 1)) break;
    fold.norm *= factor;
    const float range = q.page_factor[lane % 4] * (float)(1 << F::kBits) * 32768.0f;
    fold.again = range > kWideChannel * fold.norm ? 1u << 16 : 0;
#pragma unroll
    for (int i = 0; i < kSteps; i += 2) {
      float4& x = q.scaled[warp][i / 2][lane];
      x = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
    }
  }
  // Rows 0 - 7 of the products belong to the lower channels, rows 8 - 15 to the upper ones.
  float low[4] = {}, high[4] = {};
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    const uint32_t a[4] = {min[4 * i], min[4 * i + 1], min[4 * i + 2], min[4 * i + 3]};
    const uint2 b = q.zero_parts[i][0][lane], c = q.zero_parts[i][1][lane];
    const uint32_t lower[2] = {b.x, b.y}, upper[2] = {c.x, c.y};
    mma_f16(low, a, lower);
    mma_f16(high, a, upper);
  }
  fold.zero = (low[0] + low[1]) + (high[2] + high[3]);
}

// Where a lane finds its parts of the pages of a kv head.
template <class KF, class VF, int DK, int DV>
struct IntegerPlaces : Places<KF, VF, DK, DV> {
  // Per-channel keys: steps of the pair of channels that holds the lane's.
  const uint8_t* steps;
  // Which of the pair, for `__byte_perm`.
  uint32_t half;

  __device__ __forceinline__ IntegerPlaces(const QkvAttend& p, uint32_t head, uint32_t lane)
      : Places<KF, VF, DK, DV>(p, head, lane) {
    if constexpr (KF::kChannel) {
      steps = keep(head_pages(p, head) + p.at[0].pairs + lane / 8 * (DK / 2));
      half = keep(lane / 4 % 2 ? 0x7632u : 0x5410u);
    }
  }

  __device__ __forceinline__ void move(uint64_t distance, const IntegerPlaces& first) {
    Places<KF, VF, DK, DV>::move(distance, first);
    if constexpr (KF::kChannel) steps = first.steps + distance;
  }
};

// Scores of a page, s[i] of token 8i + g and column t.
template <class F, class Pages, int D>
__device__ __forceinline__ void integer_scores(IntegerQuery<D, F::kChannel>& q, const Pages& page, uint32_t lane, IntegerFold<D>& fold,
                                               float (&s)[8][1]) {
  constexpr int kSteps = IntegerQuery<D, F::kChannel>::kSteps, kTiles = slice_tiles<F, D>(4);
  using G = Groups<F, D>;
  constexpr int kCount = F::kChannel ? 1 : G::kCount, kRun = F::kChannel ? kSteps : G::kRun;
  Slice<F, kTiles, D> slice;
  const uint8_t* codes = page.codes;
  static_assert(kCount <= 4, "a row's lanes hold its pairs");
  TokenPairs pair;
  if constexpr (!F::kChannel) pair.load(page.keys);
#pragma unroll
  for (int mt = 0; mt < 4; mt++) {
    // At 8 bits half of the keys is asked for first: all would take more registers than four blocks have.
    if (F::kBits == 8 && mt == 2) codes = after(codes, bits_of(s[0][0]));
    if (mt % kTiles == 0) slice.load(codes, mt / kTiles);
    if constexpr (F::kChannel) {
      if (mt == 0 || (mt == 2 && F::kGroup == 32)) {
        const int at = mt == 0 ? 0 : 4 * D;
        fold_channels<F, D>(q, page.steps + at, page.keys + (at + 2 * D), page.half, threadIdx.x / 32, lane, fold);
      }
    }
#pragma unroll
    for (int j = 0; j < kCount; j++) {
      int sum[4] = {};
#pragma unroll
      for (int k = j * kRun; k < (j + 1) * kRun && k < kSteps; k++) {
        uint32_t a[4];
        integer_fragment(slice, mt % kTiles, k, a);
        if constexpr (F::kChannel) {
          mma_u8_s8(sum, a, fold.q[k]);
        } else {
          const uint32_t b[2] = {q.page[k][lane].x, q.page[k][lane].y};
          mma_u8_s8(sum, a, b);
        }
      }
      float step[2], zero[2];
      if constexpr (F::kChannel) {
        // The sums are too large by the queries' factor.
        step[0] = step[1] = inverse_power(fold.norm);
        zero[0] = zero[1] = fold.zero;
      } else {
        float x[4] = {};
        mma_f16_k8(x, pair.bits[2 * mt], pair.bits[2 * mt + 1], q.pair[j][lane]);
        zero[0] = j == 0 ? x[0] : s[2 * mt][0] + x[0];
        zero[1] = j == 0 ? x[2] : s[2 * mt + 1][0] + x[2];
        step[0] = x[1], step[1] = x[3];
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float factor = step[h] * power_of_two(-F::position(mt, h));
        s[2 * mt + h][0] = fmaf(join(sum[2 * h], sum[2 * h + 1]), factor, zero[h]);
      }
    }
  }
}

// Output of a page. `s`: scores, which `factor` takes to log2 units.
template <class F, int D, int Zeros>
__device__ __forceinline__ void integer_values(const QkvAttend& p, const PairOperands& operands, const uint8_t* codes,
                                               const uint8_t* pairs, uint32_t lane, const Tail& tail, float factor, float (&s)[8][1],
                                               IntegerState<D, Zeros>& w) {
  static_assert(F::kAffine && !F::kChannel, "values have steps per token here");
  constexpr int kRows = D / 16, kTiles = slice_tiles<F, QKV_TILE>(kRows);
  using G = Groups<F, D>;
  float most = s[0][0];
#pragma unroll
  for (int i = 1; i < 8; i++) most = fmaxf(most, s[i][0]);
  if (__any_sync(kAllLanes, fmaf(most, factor, -w.reference[0]) > kLimitAbove)) w.move(most, factor);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    s[i][0] = exp2_fast(fmaf(s[i][0], factor, -w.reference[0]));
    w.sum[0] += s[i][0];
  }

  // Weights times steps of all groups, relative to the largest of the page: 16 bits.
  static_assert(G::kCount <= 4, "a row's lanes hold its pairs");
  float y[G::kCount][8], largest = 1e-30f;
  TokenPairs pair;
  pair.load(pairs);
  if (!tail.whole) pair.clear(lane / 4, tail.tokens());
  // Of a group; returns what its weighted mins are then.
  auto weigh = [&](int j) {
    const uint32_t operand = operands.of(lane, j);
    float zero = w.zero[j];
#pragma unroll
    for (int kb = 0; kb < 4; kb++) {
      float step[2], min[2];
      pair.values(kb, operand, step, min);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        zero = fmaf(s[2 * kb + h][0], min[h], zero);
        y[j][2 * kb + h] = s[2 * kb + h][0] * step[h];
        largest = fmaxf(largest, y[j][2 * kb + h]);
      }
    }
    return zero;
  };
  float zero = weigh(0);
  if constexpr (G::kCount > 1) {
    // Any group that is not a number shows in the first one's sums. Its channels are none; all others are what they are.
    if (__any_sync(kAllLanes, zero != zero)) {
      const uint32_t none = pair.template take_out<G::kCount>();
#pragma unroll
      for (int j = 0; j < G::kCount; j++) {
        if (none >> j & 1) w.zero[j] = from_bits(0x7fffffff);
      }
      zero = weigh(0);
    }
  }
  w.zero[0] = zero;
#pragma unroll
  for (int j = 1; j < G::kCount; j++) w.zero[j] = weigh(j);
  largest = rows_max(largest);
  const float unit = largest * (1.0f / 65535), inverse = reciprocal_fast(unit);
  uint32_t b[G::kCount][4];
#pragma unroll
  for (int j = 0; j < G::kCount; j++) {
#pragma unroll
    for (int kb = 0; kb < 4; kb++) {
      // The low 16 bits of a float above 2^23 are its integer part.
      uint32_t x = bits_of(fmaf(y[j][2 * kb], inverse, 8388608.0f)), z = bits_of(fmaf(y[j][2 * kb + 1], inverse, 8388608.0f));
      b[j][kb] = transpose(__byte_perm(x, z, 0x4051));
    }
  }
  Slice<F, kTiles, QKV_TILE> slice;
#pragma unroll
  for (int m = 0; m < kRows; m++) {
    if (kShort<F, G::kCount> && m == kRows / 2) stay_below(p);
    if (m % kTiles == 0) slice.load(codes, m / kTiles);
    int sum[4] = {};
#pragma unroll
    for (int k = 0; k < 2; k++) {
      uint32_t a[4];
      integer_fragment(slice, m % kTiles, k, a);
      const uint32_t bits[2] = {b[m / 2 / G::kRun][2 * k], b[m / 2 / G::kRun][2 * k + 1]};
      mma_u8_u8(sum, a, bits);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      w.o[m][h] = fmaf(join(sum[2 * h], sum[2 * h + 1]), unit * power_of_two(-F::position(m, h)), w.o[m][h]);
    }
  }
}

// Exact rows: tokens [first, end), at most 16. The two columns of a query take its parts, and its weights'.
template <bool Channel, int DK, int DV, int Zeros>
__device__ __forceinline__ void integer_row_step(const IntegerQuery<DK, Channel>& q, const RowMemory& keys, const RowMemory& values,
                                                 int32_t first, int32_t end, const View<kIntegerColumns>& view, float factor, float cap,
                                                 bool bfloat, uint32_t lane, uint8_t* stage, IntegerState<DV, Zeros>& w) {
  float sum[1][4] = {};
  key_rows<DK, 1, 1>(&q.rows, keys, first, end, bfloat, lane, sum);
  float s[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int32_t token = first + (int32_t)lane / 4 + 8 * h;
    s[h] = (sum[0][2 * h] + sum[0][2 * h + 1]) * factor;
    if (cap > 0) s[h] = soft_cap(s[h], cap);
    if (token >= end || !view.sees(lane % 4, token)) s[h] = -kInfinity;
  }
  float most = fmaxf(s[0], s[1]);
  if (__any_sync(kAllLanes, most - w.reference[0] > kLimitAbove)) w.move(most, 1);
  uint32_t b[1][1][2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float x = exp2_fast(s[h] - w.reference[0]);
    w.sum[0] += x;
    uint16_t high = to_row_type(x, bfloat), low = to_row_type(x - from_row_type(high, bfloat), bfloat);
    b[0][0][h] = transpose(high | (uint32_t)low << 16);
  }
  value_rows<DV, 1, 1>(values, first, end, b, bfloat, lane, stage, [&](int m, int, const float (&d)[4]) {
    w.o[m][0] += d[0] + d[1];
    w.o[m][1] += d[2] + d[3];
  });
}

// The integer path of affine key format KF and value format VF.
template <class KF, class VF, int DK, int DV>
struct IntegerPath {
  static constexpr int kKeyDim = DK, kValueDim = DV, kUnitColumns = kIntegerColumns;
  using Query = IntegerQuery<DK, KF::kChannel>;
  using Pages = IntegerPlaces<KF, VF, DK, DV>;
  using Fold = IntegerFold<DK>;
  using State = IntegerState<DV, Groups<VF, DV>::kCount>;
  static constexpr bool kKeepCheap = true;
  static constexpr int kStageBytes = Staged<DV>::kBytes;

  static __device__ __forceinline__ void load(const QkvAttend& p, const Unit& u, Query& q, uint32_t warp, uint32_t lane) {
    load_query<KF::kChannel, Groups<KF, DK>::kRun, Groups<KF, DK>::kCount>(p, u, q, warp, lane);
  }

  static __device__ __forceinline__ void begin(const QkvAttend&, uint8_t*, State&) {}

  static __device__ __forceinline__ void scores(const QkvAttend&, Query& q, const Pages& page, uint32_t lane, uint8_t*, Fold& fold,
                                                float (&s)[8][1]) {
    integer_scores<KF>(q, page, lane, fold, s);
  }

  static __device__ __forceinline__ void values(const QkvAttend& p, const Query& q, const Pages& page, uint32_t lane, const Tail& tail,
                                                const float (&factor)[1], uint8_t*, float (&s)[8][1], State& w) {
    integer_values<VF, DV>(p, q.value_pairs, page.value_codes(), page.values, lane, tail, factor[0], s, w);
  }

  static __device__ __forceinline__ void finish(const QkvAttend& p, uint32_t, uint32_t lane, State& w) {
    using G = Groups<VF, DV>;
#pragma unroll
    for (int j = 0; j < G::kCount; j++) {
      float zero = rows_sum(w.zero[j]);
#pragma unroll
      for (int m = j * 2 * G::kRun; m < (j + 1) * 2 * G::kRun && m < DV / 16; m++) w.o[m][0] += zero, w.o[m][1] += zero;
    }
    if (p.format[1].rotate) rotate_output<DV>(w, p.format[1].rotate, lane);
  }

  static __device__ __forceinline__ void row(const Query& q, const RowMemory& keys, const RowMemory& values, int32_t first,
                                             int32_t end, const View<kIntegerColumns>& view, const float (&factor)[1], float cap,
                                             bool bfloat, uint32_t lane, uint8_t* stage, State& w) {
    integer_row_step<KF::kChannel, DK, DV>(q, keys, values, first, end, view, factor[0], cap, bfloat, lane, stage, w);
  }
};

}  // namespace qkv
