// Pages of a pool: blocks copied (fork, defragment), the tokens of a sequence decoded (gather), and pages rewritten from one
// order to the other (export and import).
//
//   copy_blocks    a unit is kPart bytes of one pair's block; neighbouring lanes move neighbouring 16-byte vectors.
//   gather         a unit is one operand of one page: codes and pairs to shared memory, then decoded (decode.cuh).
//   convert_pages  a unit is one operand of one page: in by one order, out by the other, padding 0.
// A number that names no block or page is left out and counted once. -1 is left out and not counted, except in a block table:
// there, a sequence lacks a page that it should have.
#include "decode.cuh"
#include "pack.cuh"

namespace qkv {

extern __shared__ uint4 shared[];

// Bytes of a block that are copied at a time: 4 vectors a thread.
constexpr uint32_t kPart = 4 * 128 * 16;

__device__ __forceinline__ void report(uint64_t status) { atomicAdd((uint32_t*)status, 1u); }

// Page number block * heads + head.
__device__ __forceinline__ uint8_t* page_at(const QkvPool& pool, uint64_t page) {
  return (uint8_t*)(pool.base + page * pool.page_bytes);
}

// A section, which is whole 16-byte vectors.
__device__ __forceinline__ void copy_section(const void* from, void* to, uint32_t bytes) {
  for (uint32_t i = threadIdx.x; i < bytes / 16; i += blockDim.x) ((uint4*)to)[i] = ((const uint4*)from)[i];
}

// One operand of a page to shared memory: codes as bytes (or 16-bit elements), pairs in row order.
__device__ __forceinline__ void load_operand(const QkvFormat& f, const QkvOperand& at, uint32_t order, const uint8_t* page,
                                             uint8_t* codes, uint32_t stride, uint32_t* pairs) {
  if (order == QKV_ORDER_FRAGMENT) {
    if (is_half(f.kind)) {
      read_fragment_halves(f, at, page, (uint16_t*)codes, stride / 2);
    } else {
      read_fragment(f, at, page, codes, stride, pairs);
    }
    return;
  }
  bool half = is_half(f.kind);
  read_rows(half ? 8 : code_bits(f), half ? 2 * at.dim : at.dim, QKV_TILE, page + at.codes, codes, stride);
  copy_section(page + at.pairs, pairs, at.pair_bytes);
}

__device__ __forceinline__ void store_operand(const QkvFormat& f, const QkvOperand& at, uint32_t order, const uint8_t* codes,
                                              uint32_t stride, const uint32_t* pairs, uint8_t* page) {
  if (order == QKV_ORDER_FRAGMENT) {
    if (is_half(f.kind)) {
      write_fragment_halves(f, at, (const uint16_t*)codes, stride / 2, page);
    } else {
      write_fragment(f, at, codes, stride, pairs, page);
    }
    return;
  }
  bool half = is_half(f.kind);
  write_rows(half ? 8 : code_bits(f), half ? 2 * at.dim : at.dim, QKV_TILE, codes, stride, page + at.codes);
  copy_section(pairs, page + at.pairs, at.pair_bytes);
  for (uint32_t i = QKV_TILE * at.row_bytes / 4 + threadIdx.x; i < at.code_bytes / 4; i += blockDim.x) {
    ((uint32_t*)(page + at.codes))[i] = 0;
  }
}

}  // namespace qkv

extern "C" __global__ void __launch_bounds__(128) qkv_copy_blocks(const __grid_constant__ QkvCopyBlocks p) {
  using namespace qkv;
  const uint64_t parts = (p.block_bytes + kPart - 1) / kPart;
  for (uint64_t unit = blockIdx.x; unit < p.count * parts; unit += gridDim.x) {
    const uint64_t pair = unit / parts, part = unit % parts;
    const int2 move = __ldg((const int2*)p.pairs + pair);
    if (move.x == -1 || move.y == -1) continue;
    if ((uint32_t)move.x >= p.blocks || (uint32_t)move.y >= p.blocks) {
      if (part == 0 && threadIdx.x == 0) report(p.status);
      continue;
    }
    if (move.x == move.y) continue;
    const uint64_t first = part * (kPart / 16) + threadIdx.x, vectors = p.block_bytes / 16;
    const uint4* from = (const uint4*)(p.base + (uint32_t)move.x * p.block_bytes);
    uint4* to = (uint4*)(p.base + (uint32_t)move.y * p.block_bytes);
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (first + 128 * i < vectors) x[i] = from[first + 128 * i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (first + 128 * i < vectors) to[first + 128 * i] = x[i];
    }
  }
}

// One block an SM is all that is asked for: with fewer registers ptxas spills around the calls on sm_89.
extern "C" __global__ void __launch_bounds__(128, 1) qkv_gather(const __grid_constant__ QkvGather p) {
  using namespace qkv;
  uint8_t* codes = (uint8_t*)shared;
  uint32_t* pairs = (uint32_t*)(codes + QKV_TILE * p.code_stride);
  const uint64_t tiles = (p.key.tokens + QKV_TILE - 1) / QKV_TILE, units = tiles * p.pool.heads * 2;
  for (uint64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const bool value = unit % 2;
    const uint32_t head = unit / 2 % p.pool.heads;
    const uint64_t tile = unit / 2 / p.pool.heads;
    const int32_t block = __ldg((const int*)p.table + tile);
    if ((uint32_t)block >= p.pool.blocks) {
      if (head == 0 && !value && threadIdx.x == 0) report(p.status);
      continue;
    }
    const QkvFormat& f = value ? p.pool.value_format : p.pool.key_format;
    const QkvOperand& at = value ? p.pool.value : p.pool.key;
    load_operand(f, at, p.order, page_at(p.pool, (uint64_t)(uint32_t)block * p.pool.heads + head), codes, p.code_stride, pairs);
    Coded coded{f, at.dim, codes, p.code_stride, pairs, 0, 0, 1.0f, nullptr};
    coded.pair_stride = f.kind == QKV_KIND_AFFINE && f.per_channel ? at.dim : at.pair_count / QKV_TILE;
    const uint64_t scales = value ? p.value_scales : p.key_scales;
    if (scales) coded.scale = __ldg((const float*)scales + head * (value ? p.value_scale_step : p.key_scale_step));
    if (!value && p.key_mean) coded.mean = (const uint16_t*)p.key_mean + (uint64_t)head * at.dim;
    const uint32_t rows = min((uint64_t)QKV_TILE, p.key.tokens - tile * QKV_TILE);
    __syncthreads();
    store_rows<true>(coded, value ? p.value : p.key, {tile * QKV_TILE, head, 1, 0, rows});
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(128) qkv_convert_pages(const __grid_constant__ QkvConvertPages p) {
  using namespace qkv;
  uint8_t* codes = (uint8_t*)shared;
  uint32_t* pairs = (uint32_t*)(codes + QKV_TILE * p.code_stride);
  const uint64_t pages = (uint64_t)p.pool.blocks * p.pool.heads;
  for (uint64_t unit = blockIdx.x; unit < p.count * 2; unit += gridDim.x) {
    const bool value = unit % 2;
    const int64_t page = __ldg((const long long*)p.pages + unit / 2);
    if ((uint64_t)page >= pages) {
      if (page != -1 && !value && threadIdx.x == 0) report(p.status);
      continue;
    }
    const QkvFormat& f = value ? p.pool.value_format : p.pool.key_format;
    const QkvOperand& at = value ? p.pool.value : p.pool.key;
    uint8_t* in_pool = page_at(p.pool, page);
    uint8_t* in_list = (uint8_t*)(p.list + unit / 2 * p.pool.page_bytes);
    load_operand(f, at, p.to_pool ? p.list_order : p.pool_order, p.to_pool ? in_list : in_pool, codes, p.code_stride, pairs);
    __syncthreads();
    store_operand(f, at, p.to_pool ? p.pool_order : p.list_order, codes, p.code_stride, pairs, p.to_pool ? in_pool : in_list);
    __syncthreads();
  }
}
