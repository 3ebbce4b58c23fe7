// Opens a step: reads which rows of the input tensors belong to which sequence, and writes old and new lengths of each to the step
// buffer, which all layers read. A warp has a sequence, its lanes look at 32 rows or 32 tiles at a time.
//
// With R tokens kept exact a sequence of `len` tokens has its tiles up to max(packed, (len - R) / 64 * 64) closed; in direct
// mode every token is in its page at once. A sequence that cannot be served (a tile that closes has no block, too many tokens)
// keeps its lengths and has 0 tokens in this step, and the status counts it; no other sequence is touched.
#include "abi.h"
#include "numeric.cuh"

namespace qkv {

constexpr uint32_t kAllLanes = 0xffffffff;

// Rows of one sequence that are not padding: neighbours, with padding before or behind them only.
struct Found {
  int32_t first, tokens;
  bool whole;
};

__device__ Found real_rows(const int64_t* slots, int32_t start, int32_t end, uint32_t lane) {
  Found f = {start, end - start, true};
  if (!slots) return f;
  f.tokens = 0;
  int32_t last = start - 1;
  for (int32_t at = start; at < end; at += 32) {
    bool real = at + (int32_t)lane < end && slots[at + lane] >= 0;
    uint32_t mask = __ballot_sync(kAllLanes, real);
    if (mask == 0) continue;
    if (f.tokens == 0) f.first = at + __ffs(mask) - 1;
    f.tokens += __popc(mask);
    last = at + 31 - __clz(mask);
  }
  f.whole = f.tokens == 0 || last - f.first + 1 == f.tokens;
  return f;
}

// The highest row at which sequence `i` or one before it begins: sequences take turns, so none may begin below it.
__device__ int32_t rows_before(const int32_t* query_start, uint32_t i, uint32_t lane) {
  int32_t most = 0;
  for (uint32_t k = lane; k <= i; k += 32) most = max(most, query_start[k]);
  return __reduce_max_sync(kAllLanes, most);
}

// Lengths that a seat can have: whole tiles are closed, and the window holds the rest.
__device__ __forceinline__ bool sound(const QkvBeginStep& p, int32_t len, int32_t packed) {
  if (len < 0) return false;
  if (p.residual < 0) return true;
  return packed >= 0 && packed <= len && packed % QKV_TILE == 0 && len - packed < p.residual + QKV_TILE;
}

}  // namespace qkv

extern "C" __global__ void __launch_bounds__(128) qkv_begin_step(const __grid_constant__ QkvBeginStep p) {
  using namespace qkv;
  uint32_t lane = threadIdx.x % 32, i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (i >= p.sequences) return;
  QkvStatus* status = (QkvStatus*)p.status;
  const int32_t* query_start = (const int32_t*)p.query_start;
  const int64_t* mapping = (const int64_t*)p.slot_mapping;
  const int32_t* table = (const int32_t*)p.block_tables + (uint64_t)i * p.table_width;
  int64_t* slots = (int64_t*)p.slots;
  bool direct = p.residual < 0, seated = p.seats != 0;

  int32_t start = query_start[i], end = query_start[i + 1], seat = seated ? ((const int32_t*)p.seats)[i] : -1;
  // Rows below `before` are others'.
  const int32_t before = rows_before(query_start, i, lane), after_all = max(before, end);
  uint32_t* problem = nullptr;
  if (start < before || end < start || end > (int32_t)p.rows) {
    problem = &status->bad_rows;
    start = end = 0;
  }
  Found rows = real_rows(mapping, start, end, lane);
  if (!rows.whole) problem = &status->bad_rows;
  int32_t len = 0, packed = 0;
  if (seated) {
    if (seat < 0 || seat >= (int32_t)p.max_sequences) {
      problem = &status->bad_seats;
      seat = 0;
      rows.tokens = 0;
    } else {
      len = ((const int32_t*)p.lengths)[2 * seat];
      packed = direct ? len : ((const int32_t*)p.lengths)[2 * seat + 1];
      if (!sound(p, len, packed)) {
        problem = &status->bad_seats;
        rows.tokens = 0;
      }
    }
  } else {
    int32_t after = ((const int32_t*)p.context_lens)[i];
    len = packed = max(after - rows.tokens, 0);
    if (after < rows.tokens) problem = &status->bad_rows;
  }
  int64_t new_len = (int64_t)len + rows.tokens;
  if (!problem && new_len > p.max_tokens) problem = &status->over_capacity;
  int32_t new_packed = direct ? (int32_t)new_len : max(packed, max((int32_t)new_len - p.residual, 0) / QKV_TILE * QKV_TILE);
  // Every tile that is written needs a block.
  int32_t first_tile = packed / QKV_TILE, end_tile = ((uint32_t)new_packed + QKV_TILE - 1) / QKV_TILE;
  if (!problem && seated) {
    bool there = end_tile <= (int32_t)p.table_width;
    for (int32_t t = first_tile + lane; there && t < end_tile; t += 32) there = (uint32_t)table[t] < p.blocks;
    if (!__all_sync(kAllLanes, there)) problem = &status->missing_blocks;
  }
  if (problem) {
    if (lane == 0) atomicAdd(problem, 1);
    new_len = len;
    new_packed = packed;
    rows.tokens = 0;
  }
  if (direct) {
    // Rows that no sequence has are written too: append reads them all.
    const int32_t all = (int32_t)p.rows, from = i == 0 ? 0 : min(before, all);
    const int32_t to = i == p.sequences - 1 ? all : min(after_all, all);
    for (int32_t row = from + lane; row < to; row += 32) {
      int32_t token = row - rows.first;
      bool real = token >= 0 && token < rows.tokens;
      int64_t slot = -1;
      if (real && seated) {
        int32_t t = len + token;
        slot = (int64_t)table[t / QKV_TILE] * QKV_TILE + t % QKV_TILE;
      } else if (real) {
        slot = mapping[row];
        if (slot >= (int64_t)p.blocks * QKV_TILE) {
          atomicAdd(&status->bad_slots, 1);
          slot = -1;
        }
      }
      slots[row] = slot;
    }
  }
  if (lane == 0) {
    QkvSequence s = {seated ? seat : -1, rows.first, rows.tokens, len, (int32_t)new_len, packed, new_packed, 0};
    ((QkvSequence*)p.step)[i] = s;
    if (seated && !problem) {
      ((int32_t*)p.lengths)[2 * seat] = (int32_t)new_len;
      ((int32_t*)p.lengths)[2 * seat + 1] = new_packed;
    }
  }
}
