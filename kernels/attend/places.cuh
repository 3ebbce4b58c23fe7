// Where a lane finds its parts of the pages of a kv head. The addresses of block 0 are made once for a unit; a page costs one product,
// its distance from there, and an addition for each.
#pragma once
#include "codes.cuh"

namespace qkv {

// Keeps the compiler from making `x` anew in every page.
template <class T>
__device__ __forceinline__ T keep(T x) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(x));
  } else {
    asm volatile("" : "+r"(x));
  }
  return x;
}

// `x`, not before `done` is there: what is loaded through it does not take registers earlier.
template <class Done>
__device__ __forceinline__ const uint8_t* after(const uint8_t* x, Done done) {
  asm volatile("" : "+l"(x) : "r"(done));
  return x;
}

// Whether there are no registers for all codes that could be asked for ahead: those of 8 bits, with many pairs a token.
template <class F, int Count>
constexpr bool kShort = F::kAffine && !F::kChannel && F::kBits == 8 && Count > 2;

// ptxas moves nothing up over this, as it does over an empty `asm volatile`: a branch that is never taken, since there are fewer than
// 2^31 heads.
__device__ __forceinline__ void stay_below(const QkvAttend& p) {
  if ((int32_t)p.heads < 0) asm volatile("trap;");
}

__device__ __forceinline__ const uint8_t* head_pages(const QkvAttend& p, uint32_t head) {
  return (const uint8_t*)p.pages + (uint64_t)head * p.page_bytes;
}

// First byte of the lane's part of an operand's pairs, row g of the pages' rows: of a channel of values, or of one group of a token.
template <class F, int D>
__device__ __forceinline__ uint32_t pair_byte(uint32_t lane) {
  constexpr int kCount = Groups<F, D>::kCount;
  if constexpr (F::kChannel) return lane / 4 * (D / 2);
  return (lane / 4 * kCount + lane % 4 % kCount) * 32;
}

// Pages of one format.
template <class KF, class VF, int DK, int DV>
struct Places {
  // Both operands have as many pairs a token, so they lie alike.
  static constexpr bool kAlike = KF::kAffine && VF::kAffine && !KF::kChannel && !VF::kChannel &&
                                 Groups<KF, DK>::kCount == Groups<VF, DV>::kCount;
  static constexpr int kKeyPairs = QKV_TILE * 4 * Groups<KF, DK>::kCount;
  // First vectors of codes; pairs of keys and of values, where there are any.
  const uint8_t *codes, *keys, *values;
  // How far behind the codes those lie; `kAlike` ones of values are found from the keys'.
  uint32_t key_distance, value_distance;

  __device__ __forceinline__ Places(const QkvAttend& p, uint32_t head, uint32_t lane) {
    const uint8_t* page = head_pages(p, head);
    codes = keep(page + lane * 16);
    const uint32_t at = KF::kChannel ? lane % 4 * (DK / 2) : pair_byte<KF, DK>(lane);
    if (KF::kPairs) key_distance = keep(p.at[0].pairs + at - lane * 16);
    if (VF::kPairs && !kAlike) value_distance = keep(p.at[1].pairs + pair_byte<VF, DV>(lane) - lane * 16);
  }

  // Those of the page `distance` bytes behind the first.
  __device__ __forceinline__ void move(uint64_t distance, const Places& first) {
    codes = first.codes + distance;
    if constexpr (KF::kPairs) keys = codes + first.key_distance;
    if constexpr (kAlike) {
      values = keys + kKeyPairs;
    } else if constexpr (VF::kPairs) {
      values = codes + first.value_distance;
    }
  }

  __device__ __forceinline__ const uint8_t* value_codes() const { return codes + kCodeBytes<KF, QKV_TILE, DK>; }
};

// Pages whose formats only the parameters tell.
struct AnyPlaces {
  const uint8_t* page;

  __device__ __forceinline__ AnyPlaces(const QkvAttend& p, uint32_t head, uint32_t) : page(head_pages(p, head)) {}

  __device__ __forceinline__ void move(uint64_t distance, const AnyPlaces& first) { page = first.page + distance; }
};

}  // namespace qkv
