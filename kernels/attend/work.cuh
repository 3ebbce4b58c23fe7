// Which block does what. The work of a launch is a list of units, one for each (sequence, kv head, column block) in that order.
// A unit is a list of items: the pages of 64 tokens that a query sees, then the window 16 rows at a time, then the sink rows.
//
// Each item has a weight, and block c takes the items that begin in [total c / blocks, total (c + 1) / blocks) of the weights
// laid end to end. So no list is ever stored: every block finds its own place from the step buffer, and `combine` finds the
// blocks that share a unit.
//
// With a fixed split a unit is cut into chunks of `split` items instead, whatever else is in the batch, and block c takes whole
// chunks, those of number [total c / blocks, total (c + 1) / blocks): weights below are then numbers of chunks.
#pragma once
#include "../abi.h"
#include "../ptx.cuh"

namespace qkv {

constexpr uint32_t kAllLanes = 0xffffffff;
// Rows of an item of the window.
constexpr int32_t kItemRows = 16;

struct Items {
  // Pages [first_page, first_page + pages), window tokens [row_begin, row_end) and whether the sink rows are read.
  int32_t first_page, pages;
  int32_t row_begin, row_end;
  int32_t row_items;
  int32_t sinks;

  __device__ __forceinline__ int32_t count() const { return max(pages + row_items + sinks, 1); }
};

__device__ __forceinline__ int32_t pages_of(const QkvSequence& s) {
  return (int32_t)(((uint32_t)s.new_packed + QKV_TILE - 1) / QKV_TILE);
}

// The items of a sequence, the same for all its heads. Pages behind the block table do not exist.
__device__ __forceinline__ Items items_of(const QkvAttend& p, const QkvSequence& s) {
  // The first token that the first query sees.
  int32_t low = p.sliding_window ? max(s.old_len + 1 - (int32_t)min(p.sliding_window, 0x7fffffffu), 0) : 0;
  Items i;
  i.first_page = low / QKV_TILE;
  i.pages = max(min(pages_of(s), (int32_t)p.table_width) - i.first_page, 0);
  i.row_begin = max(max(s.new_packed, (int32_t)p.sinks), low);
  i.row_end = p.direct ? i.row_begin : s.new_len;
  i.row_items = max(i.row_end - i.row_begin + kItemRows - 1, 0) / kItemRows;
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
  if (p.split) return ((uint32_t)items.count() + p.split - 1) / p.split;
  return weight_before(p, items, items.count()) + p.unit_weight;
}

// Column blocks of a kv head of a sequence with new tokens.
__device__ __forceinline__ uint32_t column_blocks(const QkvAttend& p, const QkvSequence& s) {
  return ((uint32_t)min(s.tokens, (int32_t)p.max_query) * p.group + p.columns - 1) / p.columns;
}

__device__ __forceinline__ uint32_t units_of_sequence(const QkvAttend& p, const QkvSequence& s) {
  return p.heads * column_blocks(p, s);
}

// Adds up the weights of all sequences, and of those before the one that holds `at` (or that is number `sequence`). A warp does it
// alone, its lanes look at 32 sequences at a time.
template <class Wanted>
__device__ __forceinline__ uint64_t weigh(const QkvAttend& p, uint32_t lane, Wanted wanted) {
  uint64_t before = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < p.sequences; first += 32) {
    uint32_t i = first + lane;
    uint64_t own = 0;
    if (i < p.sequences) {
      const QkvSequence s = sequence_of(p, i);
      own = unit_weight(p, s) * units_of_sequence(p, s);
    }
    uint64_t sum = own;
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

// f32 of partial result number `place`: for each column the reference, the sum and value dim outputs. Block c has places 2c, for a
// unit that others began, and 2c + 1, for one that others end; with a fixed split each chunk has one.
__device__ __forceinline__ float* partial(const QkvAttend& p, uint64_t place) {
  return (float*)p.workspace + place * ((uint64_t)p.columns * (p.at[1].dim + 2));
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
  const uint32_t blocks = column_blocks(p, s), first = index % blocks * p.columns;
  return {s, sequence, index / blocks, first, (int32_t)min((uint32_t)s.tokens * p.group - first, p.columns)};
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
  // Of the partial result; -1: the unit is whole.
  int64_t place;
};

// Moves the cursor to the next unit of which this block has items, and says which. False: there is none.
__device__ __forceinline__ bool next_piece(const QkvAttend& p, Cursor& c, Piece& piece) {
  for (; c.sequence < p.sequences && c.at < c.end; c.sequence++, c.unit = 0) {
    const QkvSequence s = sequence_of(p, c.sequence);
    const uint64_t weight = unit_weight(p, s);
    if (weight == 0) continue;
    const Items items = items_of(p, s);
    if (c.unit == 0 && c.begin > c.at) c.unit = (uint32_t)((c.begin - c.at) / weight);
    const uint32_t units = units_of_sequence(p, s);
    while (c.unit < units) {
      const uint32_t unit = c.unit;
      const uint64_t first = c.at + unit * weight;
      if (max(c.begin, first) >= c.end) return false;
      int32_t from, to;
      int64_t place;
      if (p.split) {
        // Chunks of a unit one after the other.
        const uint64_t chunk = max(c.begin, first);
        from = (int32_t)((chunk - first) * p.split);
        to = (int32_t)min((uint64_t)from + p.split, (uint64_t)items.count());
        place = weight > 1 ? (int64_t)chunk : -1;
        c.begin = chunk + 1;
        c.unit += to == items.count();
        // Lengths that the host does not know of get no more memory.
        if (place >= (int64_t)p.places) continue;
      } else {
        from = c.begin > first ? item_at(p, items, c.begin - first) : 0;
        to = c.end - first >= weight ? items.count() : item_at(p, items, c.end - first);
        place = from > 0 ? 2 * (int64_t)blockIdx.x : to < items.count() ? 2 * (int64_t)blockIdx.x + 1 : -1;
        c.unit++;
      }
      if (from >= to) continue;
      if (!served(p, s)) {
        if (unit == 0 && from == 0 && threadIdx.x == 0) atomicAdd(&((QkvStatus*)p.status)->bad_rows, 1);
        continue;
      }
      const int32_t missing = pages_of(s) - max((int32_t)p.table_width, items.first_page);
      if (missing > 0 && from == 0 && threadIdx.x == 0) atomicAdd(&((QkvStatus*)p.status)->missing_blocks, missing);
      piece = {unit_of(p, s, c.sequence, unit), items, from, to, place};
      return true;
    }
    c.at += weight * units;
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
