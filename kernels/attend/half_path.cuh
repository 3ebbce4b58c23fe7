// Decode attention on the f16 path: up to 8 NT columns (query, head) of a kv head at a time.
#pragma once
#include "half_any.cuh"
#include "kernel.cuh"

namespace qkv {

// `Keys` and `Values`: one format each, or any.
template <class Keys, class Values, int DK, int DV, int NT>
struct HalfPath {
  static constexpr int kKeyDim = DK, kValueDim = DV, kUnitColumns = 8 * NT, kColumns = 2 * NT;
  using Query = HalfQuery<DK, NT>;
  using Pages = typename Keys::template Pages<Values, DK, DV>;
  using Fold = Folded<DK, NT>;
  using State = HalfState<DV, NT, Values::template kZeros<DV>>;
  static constexpr bool kKeepCheap = State::kKeepCheap;
  // Shared memory of a warp: while pages are read, fragments and what the state has there; then rows.
  static constexpr int kPageBytes = Values::template kStageUsed<DV, NT> + State::kSharedBytes, kRowBytes = Staged<DV>::kBytes;
  static constexpr int kStageBytes = kPageBytes > kRowBytes ? kPageBytes : kRowBytes;

  static __device__ __forceinline__ void load(const QkvAttend& p, const Unit& u, Query& q, uint32_t warp, uint32_t lane) {
    load_query<Keys::template kRun<DK>, Keys::template kGroups<DK>, Keys::kPaired, DK, NT>(p, u, q, Keys::kScoreUnit, warp, lane);
  }

  static __device__ __forceinline__ void begin(const QkvAttend& p, uint8_t* stage, State& w) {
    Values::template begin<DV, NT>(p, stage, w);
  }

  static __device__ __forceinline__ void scores(const QkvAttend& p, const Query& q, const Pages& page, uint32_t lane,
                                                uint8_t* stage, Fold& fold, float (&s)[8][kColumns]) {
    Keys::template scores<DK, NT>(p, q, page, lane, stage, fold, s);
  }

  static __device__ __forceinline__ void values(const QkvAttend& p, const Query& q, const Pages& page, uint32_t lane,
                                                const Tail& tail, const float (&factor)[kColumns], uint8_t* stage,
                                                float (&s)[8][kColumns], State& w) {
    Values::template values<DV, NT>(p, q, page, lane, tail, factor, stage, s, w);
  }

  static __device__ __forceinline__ void finish(const QkvAttend& p, uint32_t head, uint32_t lane, State& w) {
    Values::template finish<DV, NT>(p, head, lane, w);
  }

  static __device__ __forceinline__ void row(const Query& q, const RowMemory& keys, const RowMemory& values, int32_t first,
                                             int32_t end, const View<kUnitColumns>& view, const float (&factor)[kColumns],
                                             float cap, bool bfloat, uint32_t lane, uint8_t* stage, State& w) {
    row_step<DK, DV, NT>(q, keys, values, first, end, view, factor, cap, bfloat, lane, stage, w);
  }
};

// One format.
template <class F>
struct KeysOf {
  using Format = F;
  template <class Values, int DK, int DV>
  using Pages = Places<F, typename Values::Format, DK, DV>;
  template <int D>
  static constexpr int kRun = F::kAffine && !F::kChannel ? Groups<F, D>::kRun : 1;
  template <int D>
  static constexpr int kGroups = F::kAffine && !F::kChannel ? Groups<F, D>::kCount : 0;
  static constexpr bool kPaired = F::kChannel;
  static constexpr float kScoreUnit = F::kFp8 ? F::kUnit : 1.0f;

  template <int D, int NT, class Pages>
  static __device__ __forceinline__ void scores(const QkvAttend& p, const HalfQuery<D, NT>& q, const Pages& page, uint32_t lane,
                                                uint8_t*, Folded<D, NT>& fold, float (&s)[8][2 * NT]) {
    half_scores<F, D, NT>(p, q, page.codes, page.keys, lane, fold, s);
  }
};

template <class F>
struct ValuesOf {
  using Format = F;
  // What a warp's stage is used for while pages are read.
  template <int D, int NT>
  static constexpr int kStageUsed = 0;
  template <int D>
  static constexpr int kZeros = F::kAffine && !F::kChannel ? Groups<F, D>::kCount : 0;

  template <int D, int NT>
  static __device__ __forceinline__ void begin(const QkvAttend& p, uint8_t* stage, HalfState<D, NT, kZeros<D>>& w) {
    w.clear_zeros(stage);
    half_begin_pages<F>(p, w);
  }

  template <int D, int NT, class Query, class Pages>
  static __device__ __forceinline__ void values(const QkvAttend& p, const Query& q, const Pages& page, uint32_t lane,
                                                const Tail& tail, const float (&factor)[2 * NT], uint8_t*,
                                                float (&s)[8][2 * NT], HalfState<D, NT, kZeros<D>>& w) {
    half_values<F, D, NT>(p, q, page.value_codes(), page.values, lane, tail, factor, s, w);
  }

  template <int D, int NT>
  static __device__ __forceinline__ void finish(const QkvAttend& p, uint32_t head, uint32_t lane,
                                                HalfState<D, NT, kZeros<D>>& w) {
    half_finish_pages<F, D, NT>(p, head, lane, w);
  }
};

}  // namespace qkv
