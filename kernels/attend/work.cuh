// Which block does what. The work of a launch is a list of units, one for each (sequence, kv head, column block) in that order.
// A unit is a list of items: the pages of 64 tokens that a query sees, then the window 64 rows at a time, then the sink rows.
// Each item has a weight, and block c takes the items that begin in [total c / blocks, total (c + 1) / blocks) of the weights
// laid end to end. So no list is ever stored: every block finds its own place from the step buffer, and `combine` finds the
// blocks that share a unit.
#pragma once
#include "../abi.h"
#include "../ptx.cuh"

namespace qkv {

constexpr uint32_t kAllLanes = 0xffffffff;

struct Items {
  // Pages [first_page, first_page + pages), window tokens [row_begin, row_end) and whether the sink rows are read.
  int32_t first_page, pages;
  int32_t row_begin, row_end;
  int32_t row_tiles;
  int32_t sinks;

  __device__ __forceinline__ int32_t count() const { return max(pages + row_tiles + sinks, 1); }
};

// The items of a sequence, the same for all its heads.
__device__ __forceinline__ Items items_of(const QkvAttend& p, const QkvSequence& s) {
  // The first token that the first query sees.
  int32_t low = p.sliding_window ? max(s.old_len + 1 - (int32_t)min(p.sliding_window, 0x7fffffffu), 0) : 0;
  Items i;
  i.first_page = low / QKV_TILE;
  i.pages = max((int32_t)((uint32_t)s.new_packed + QKV_TILE - 1) / QKV_TILE - i.first_page, 0);
  i.row_begin = max(max(s.new_packed, (int32_t)p.sinks), low);
  i.row_end = p.direct ? i.row_begin : s.new_len;
  i.row_tiles = max(i.row_end - i.row_begin + QKV_TILE - 1, 0) / QKV_TILE;
  i.sinks = !p.direct && low < min((int32_t)p.sinks, s.new_len);
  return i;
}

// Weight of a unit's items before item i.
__device__ __forceinline__ uint64_t weight_before(const QkvAttend& p, const Items& items, int32_t i) {
  int32_t pages = min(i, items.pages);
  return (uint64_t)pages * p.page_weight + (uint64_t)(i - pages) * p.row_weight;
}

// The first item that begins at or after `weight`.
__device__ __forceinline__ int32_t item_at(const QkvAttend& p, const Items& items, uint64_t weight) {
  uint64_t pages = (uint64_t)items.pages * p.page_weight, i;
  if (weight <= pages) {
    i = (weight + p.page_weight - 1) / p.page_weight;
  } else {
    i = items.pages + (weight - pages + p.row_weight - 1) / p.row_weight;
  }
  return (int32_t)min(i, (uint64_t)items.count());
}

__device__ __forceinline__ QkvSequence sequence_of(const QkvAttend& p, uint32_t i) {
  const int4* s = (const int4*)p.step + 2 * (uint64_t)i;
  int4 a = __ldg(s), b = __ldg(s + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

// Weight of a unit of a sequence; 0 for one without new tokens.
__device__ __forceinline__ uint64_t unit_weight(const QkvAttend& p, const QkvSequence& s) {
  if (s.tokens <= 0) return 0;
  Items items = items_of(p, s);
  return weight_before(p, items, items.count()) + p.unit_weight;
}

__device__ __forceinline__ uint32_t units_of_sequence(const QkvAttend& p) { return p.heads * p.column_blocks; }


// Adds up the weights of all sequences, and of those before the one that holds `at` (or that is number `sequence`). A warp does it
// alone, its lanes look at 32 sequences at a time.
template <class Wanted>
__device__ __forceinline__ uint64_t weigh(const QkvAttend& p, uint32_t lane, Wanted wanted) {
  uint64_t before = 0;
  for (uint32_t first = 0; first < p.sequences; first += 32) {
    uint32_t i = first + lane;
    uint64_t own = i < p.sequences ? unit_weight(p, sequence_of(p, i)) * units_of_sequence(p) : 0, sum = own;
#pragma unroll
    for (int s = 1; s < 32; s *= 2) {
      uint64_t other = __shfl_up_sync(kAllLanes, sum, s);
      if (lane >= s) sum += other;
    }
    if (wanted(i, before + sum - own, before + sum)) return before;
    before += __shfl_sync(kAllLanes, sum, 31);
  }
  return before;
}

__device__ __forceinline__ uint64_t total_weight(const QkvAttend& p, uint32_t lane) {
  return weigh(p, lane, [](uint32_t, uint64_t, uint64_t) { return false; });
}

// The sequence whose weight holds `at`, and where it begins. `at` < total.
__device__ __forceinline__ uint32_t sequence_at(const QkvAttend& p, uint32_t lane, uint64_t at, uint64_t& begin) {
  uint32_t found = 0;
  weigh(p, lane, [&](uint32_t i, uint64_t from, uint64_t to) {
    uint32_t mask = __ballot_sync(kAllLanes, from <= at && at < to);
    if (mask == 0) return false;
    int holder = __ffs(mask) - 1;
    found = __shfl_sync(kAllLanes, i, holder);
    begin = __shfl_sync(kAllLanes, from, holder);
    return true;
  });
  return found;
}

// Where sequence i begins.
__device__ __forceinline__ uint64_t begin_of(const QkvAttend& p, uint32_t lane, uint32_t sequence) {
  uint64_t begin = 0;
  weigh(p, lane, [&](uint32_t i, uint64_t from, uint64_t) {
    uint32_t mask = __ballot_sync(kAllLanes, i == sequence);
    if (mask == 0) return false;
    begin = __shfl_sync(kAllLanes, from, __ffs(mask) - 1);
    return true;
  });
  return begin;
}

// The weight at which block c begins, and the block that takes an item which begins at `at`.
__device__ __forceinline__ uint64_t block_begin(const QkvAttend& p, uint64_t total, uint32_t c) {
  return total * c / p.blocks_launched;
}

__device__ __forceinline__ uint32_t block_of(const QkvAttend& p, uint64_t total, uint64_t at) {
  return (uint32_t)(((at + 1) * p.blocks_launched - 1) / total);
}

// f32 of a partial result: for each column the reference, the sum and value dim outputs; and its place for block c, which may have
// one unit that others began (slot 0) and one that others end (slot 1).
__device__ __forceinline__ float* partial(const QkvAttend& p, uint32_t c, uint32_t slot) {
  uint64_t floats = (uint64_t)p.columns * (p.at[1].dim + 2);
  return (float*)p.workspace + (2 * (uint64_t)c + slot) * floats;
}

// One (sequence, kv head, column block).
struct Unit {
  QkvSequence s;
  uint32_t sequence;
  uint32_t head;
  // First column, and columns that exist.
  uint32_t first_column;
  int32_t columns;
};

__device__ __forceinline__ Unit unit_of(const QkvAttend& p, const QkvSequence& s, uint32_t sequence, uint32_t index) {
  uint32_t first = index % p.column_blocks * p.columns;
  int64_t left = (int64_t)s.tokens * p.group - first;
  return {s, sequence, index / p.column_blocks, first, (int32_t)max(min(left, (int64_t)p.columns), (int64_t)0)};
}

// Whether a sequence's queries are within what the launch was made for.
__device__ __forceinline__ bool served(const QkvAttend& p, const QkvSequence& s) { return s.tokens <= (int32_t)p.max_query; }

// Where a block is in its range. In shared memory: the loops over items have better use for registers.
struct Cursor {
  uint64_t begin, end;
  // Where the sequence's weight begins.
  uint64_t at;
  uint32_t sequence, unit;
};

// What a block works on at the moment: items [from, to) of a unit.
struct Piece {
  Unit unit;
  Items items;
  int32_t from, to;
};

// Moves the cursor to the next unit of which this block has items, and says which. False: there is none.
__device__ __forceinline__ bool next_piece(const QkvAttend& p, Cursor& c, Piece& piece) {
  for (; c.sequence < p.sequences && c.at < c.end; c.sequence++, c.unit = 0) {
    const QkvSequence s = sequence_of(p, c.sequence);
    const uint64_t weight = unit_weight(p, s);
    if (weight == 0) continue;
    const Items items = items_of(p, s);
    if (c.unit == 0 && c.begin > c.at) c.unit = (uint32_t)((c.begin - c.at) / weight);
    for (; c.unit < units_of_sequence(p); c.unit++) {
      const uint64_t first = c.at + c.unit * weight;
      if (first >= c.end) return false;
      int32_t from = c.begin > first ? item_at(p, items, c.begin - first) : 0;
      int32_t to = c.end - first >= weight ? items.count() : item_at(p, items, c.end - first);
      if (from >= to) continue;
      if (!served(p, s)) {
        if (c.unit == 0 && from == 0 && threadIdx.x == 0) atomicAdd(&((QkvStatus*)p.status)->bad_rows, 1);
        continue;
      }
      Unit u = unit_of(p, s, c.sequence, c.unit);
      if (u.columns == 0) continue;
      piece = {u, items, from, to};
      c.unit++;
      return true;
    }
    c.at += weight * units_of_sequence(p);
  }
  return false;
}

// Calls `work` for each piece of this block. All threads together; `work` ends with a barrier. `cursor` and `piece` are shared
// memory. The first warp looks for pieces; none is told by an empty one.
template <class Work>
__device__ __forceinline__ void for_pieces(const QkvAttend& p, Cursor& cursor, Piece& piece, Work work) {
  if (threadIdx.x < 32) {
    const uint32_t lane = fresh_lane();
    const uint64_t total = total_weight(p, lane);
    Cursor c = {0, 0, 0, p.sequences, 0};
    if (total > 0) {
      c.begin = block_begin(p, total, blockIdx.x);
      c.end = block_begin(p, total, blockIdx.x + 1);
      if (c.begin < c.end) c.sequence = sequence_at(p, lane, c.begin, c.at);
    }
    if (lane == 0) cursor = c;
    __syncwarp();
  }
  while (true) {
    if (threadIdx.x < 32) {
      Cursor c = cursor;
      Piece next = {};
      next_piece(p, c, next);
      __syncwarp();
      if (threadIdx.x == 0) {
        cursor = c;
        piece = next;
      }
    }
    __syncthreads();
    if (piece.from >= piece.to) return;
    work();
  }
}

}  // namespace qkv
