// Pages decoded once for all blocks of query rows, in memory that the caller lends: tiles as prefill has them in shared memory
// (prefill_stage.cuh), which a block then only copies.
#pragma once
#include "prefill_pages.cuh"
#include "prefill_queries.cuh"

namespace qkv {

// One page: the tile of keys with its row padding, the transposed tile of values, the factors of both.
template <int DK, int DV>
struct DecodedPage {
  static constexpr uint32_t kValue = QKV_TILE * kRowBytes<DK>, kValueBytes = DV * kChannelBytes, kFactor = kValue + kValueBytes;
  static constexpr uint32_t kBytes = kFactor + 16;

  static __device__ __forceinline__ float factor(const uint8_t* page, int op) { return __ldg((const float*)(page + kFactor) + op); }
};

// The first page that a new token of the sequence sees; with bidirectional ranges some see more.
__device__ __forceinline__ int32_t first_page_of(const QkvPrefill& p, const QkvSequence& s) {
  return p.sliding_window ? max(s.old_len + 1 - (int32_t)p.sliding_window, 0) / QKV_TILE : 0;
}

// Page `i` of those that lie decoded.
template <int DK, int DV>
__device__ __forceinline__ const uint8_t* decoded_page(const QkvPrefill& p, const Work& w, uint32_t i) {
  const uint64_t at = ((uint64_t)w.sequence * p.heads + w.head) * p.decoded_pages + i;
  return (const uint8_t*)p.decoded + at * DecodedPage<DK, DV>::kBytes;
}

// All threads; done at the next `copy_wait`.
__device__ __forceinline__ void copy_page(uint32_t to, const uint8_t* from, uint32_t bytes) {
#pragma unroll 4
  for (uint32_t i = 16 * threadIdx.x; i < bytes; i += 16 * blockDim.x) copy_async(to + i, from + i, true);
}

// `tile`: where it is staged, at `address` of shared memory; `scratch`: a number a warp.
template <int D>
__device__ __forceinline__ Staged staged_operand(const QkvPrefill& p, int op, uint32_t head, uint8_t* tile, uint32_t address,
                                                 float* scratch, uint32_t scratch_stride) {
  const uint32_t group = p.format[op].group;
  const float scale = p.scales[op] ? __ldg((const float*)p.scales[op] + head) : 1.0f;
  const uint32_t shift = group & (group - 1) ? 31u : 31u - __clz(group | 1);
  return {p.format[op], p.at[op], tile, address, kRowBytes<D>, scratch, scratch_stride, 0, scale, shift, 1.0f};
}

// Decodes the pages that `decoded` has room for. A block takes a page at a time.
template <int DK, int DV>
__device__ __forceinline__ void decode_pages(const QkvPrefill& p, uint8_t* shared) {
  using D = DecodedPage<DK, DV>;
  float* scratch = (float*)(shared + D::kFactor);
  const uint32_t base = shared_address(shared);
  // What a head does not have, and the padding.
  for (uint32_t i = threadIdx.x; i < D::kBytes / 16; i += blockDim.x) ((uint4*)shared)[i] = make_uint4(0, 0, 0, 0);
  const uint64_t jobs = (uint64_t)p.sequences * p.heads * p.decoded_pages;
  for (uint64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    const uint32_t unit = (uint32_t)(job / p.decoded_pages), head = unit % p.heads, sequence = unit / p.heads;
    const QkvSequence s = ((const QkvSequence*)p.step)[sequence];
    const int32_t page = first_page_of(p, s) + (int32_t)(job % p.decoded_pages);
    if (s.tokens <= 0 || page * QKV_TILE >= s.old_packed || page >= (int32_t)p.table_width) continue;
    const uint32_t block = (uint32_t)__ldg((const int32_t*)p.block_tables + (uint64_t)sequence * p.table_width + page);
    if (block >= p.blocks) continue;
    const uint8_t* data = (const uint8_t*)p.pages + ((uint64_t)block * p.heads + head) * p.page_bytes;
    Staged keys = staged_operand<DK>(p, 0, head, shared, base, scratch, 1);
    Staged values = staged_operand<DV>(p, 1, head, shared + D::kValue, base + D::kValue, scratch, 1);
    // The page before was copied; maxima share the scratch.
    __syncthreads();
    if (__syncthreads_or(stage_page<false>(keys, data))) stage_affine_wide<false>(keys, data);
    if (__syncthreads_or(stage_page<true>(values, data))) stage_affine_wide<true>(values, data);
    __syncthreads();
    uint8_t* to = (uint8_t*)p.decoded + job * D::kBytes;
    for (uint32_t i = threadIdx.x; i < D::kFactor / 16; i += blockDim.x) ((uint4*)to)[i] = ((const uint4*)shared)[i];
    if (threadIdx.x == 0) *(float2*)(to + D::kFactor) = make_float2(keys.factor, values.factor);
  }
}

}  // namespace qkv
