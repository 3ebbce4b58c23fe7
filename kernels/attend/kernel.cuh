// Decode attention: a block takes a range of items (`work.cuh`), the pages first, then exact rows. Each of its warps takes whole items, so
// warps wait for each other only where the list of pages is read on, and at a unit's end, where their results are merged. A `Path` says
// how scores and outputs of a page are made.
#pragma once
#include "merge.cuh"
#include "rows.cuh"

namespace qkv {

// Where a piece's pages lie, in blocks of the cache, so many at a time: all threads read a part of the table together, each sector once.
constexpr uint32_t kListed = 256;

struct PageList {
  uint32_t blocks[kListed];
  // Behind the piece's last page.
  int32_t end;

  // Looked up where it is used: the page loop has no register for it.
  __device__ __forceinline__ int32_t behind() const { return (int32_t)load_shared(shared_address(&end)); }

  // Of the pages from `first` on. By all threads.
  __device__ __forceinline__ void load(const QkvAttend& p, uint32_t sequence, int32_t first, int32_t end) {
    const uint32_t* table = (const uint32_t*)p.block_tables + (uint64_t)sequence * p.table_width + first;
    // It runs once a piece: unrolled it would only be large.
#pragma unroll 1
    for (int32_t i = (int32_t)threadIdx.x; i < min((int32_t)kListed, end - first); i += 32 * kWarps) blocks[i] = __ldg(table + i);
  }
};

template <class Path>
struct Shared {
  Cursor cursor;
  Piece piece;
  PageList pages;
  View<Path::kUnitColumns> view;
  alignas(16) typename Path::Query query;
  union {
    alignas(16) uint8_t stage[kWarps][Path::kStageBytes];
    MergeShared<Path::kValueDim, Path::kUnitColumns> merge;
  };
};

// Scores, which `factor` takes to log2 units when `mean` is added, of a page of which not all is plain: capped and masked.
template <class State, int Columns>
__device__ __forceinline__ void cap_and_mask(const QkvAttend& p, int32_t first, uint32_t lane, const View<Columns>& view,
                                             const float (&factor)[State::kColumns], const float* mean,
                                             float (&s)[8][State::kColumns]) {
  constexpr int Count = State::kColumns;
  if (p.softcap > 0) {
#pragma unroll
    for (int j = 0; j < Count; j++) {
      const float back = 1 / factor[j], m = mean[State::column(j, lane % 4)];
#pragma unroll
      for (int i = 0; i < 8; i++) s[i][j] = soft_cap((s[i][j] + m) * factor[j], p.softcap) * back - m;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int32_t token = first + 8 * i + (int32_t)lane / 4;
#pragma unroll
    for (int j = 0; j < Count; j++) {
      if (token < (int32_t)p.sinks || !view.sees(State::column(j, lane % 4), token)) s[i][j] = -kInfinity;
    }
  }
}

template <class Path>
struct Attend {
  static constexpr int kColumns = Path::State::kColumns, DK = Path::kKeyDim, DV = Path::kValueDim;
  using Query = typename Path::Query;
  using State = typename Path::State;

  // Both look at the piece anew, so that nothing of one is kept in registers during the other. Item `warp` of the piece and every
  // fourth after it are this warp's.
  static __device__ __forceinline__ void pages(const QkvAttend& p, Shared<Path>& shared, State& w) {
    const Unit& u = shared.piece.unit;
    const Items& items = shared.piece.items;
    auto& q = shared.query;
    auto& view = shared.view;
    const uint32_t lane = fresh_lane(), warp = threadIdx.x / 32;
    uint8_t* stage = shared.stage[warp];
    float factor[kColumns];
    auto load_factors = [&](uint32_t lane) {
#pragma unroll
      for (int j = 0; j < kColumns; j++) factor[j] = q.page_factor[State::column(j, lane % 4)];
    };
    load_factors(lane);
    typename Path::Pages first(p, u.head, lane);
    auto page = first;
    const uint32_t block_bytes = Path::kKeepCheap ? keep(p.heads * p.page_bytes) : p.heads * p.page_bytes;
    int32_t tile = items.first_page + shared.piece.from + (int32_t)warp;
    uint32_t at = warp;
    if (tile >= shared.pages.behind()) return;
    typename Path::Fold fold;
    fold.clear();
    Path::begin(p, stage, w);
    auto next = [&] {
      tile += kWarps, at = (at + kWarps) % kListed;
      if (at >= kWarps) return;
      // The list is used up, and by all warps: if there are more pages, each had one of the last four.
      const int32_t listed = tile - (int32_t)at, end = shared.pages.behind();
      if (listed >= end) return;
      __syncthreads();
      shared.pages.load(p, u.sequence, listed, end);
      __syncthreads();
    };
    for (; tile < shared.pages.behind(); next()) {
      const uint32_t block = shared.pages.blocks[at];
      // The vote tells the compiler that all lanes agree.
      if (__any_sync(kAllLanes, block >= p.blocks)) {
        // The tokens of a page that does not exist take no part.
        if (lane == 0) atomicAdd(&((QkvStatus*)p.status)->missing_blocks, 1);
        continue;
      }
      if constexpr (!Path::kKeepCheap) {
        first = typename Path::Pages(p, u.head, fresh_lane());
        load_factors(fresh_lane());
      }
      page.move((uint64_t)block * block_bytes, first);
      const bool whole = __all_sync(kAllLanes, view.whole(tile));
      float s[8][kColumns];
      Path::scores(p, q, page, lane, stage, fold, s);
      if (!whole) cap_and_mask<State>(p, tile * QKV_TILE, lane, view, factor, q.mean, s);
      Path::values(p, q, page, lane, Tail{whole, u.s.new_len, tile}, factor, stage, s, w);
    }
    Path::finish(p, u.head, lane, w);
    if constexpr (!Path::kKeepCheap) load_factors(fresh_lane());
    // Scores of pages lack the keys' mean, which shifts all of a column alike.
#pragma unroll
    for (int j = 0; j < kColumns; j++) w.reference[j] = fmaf(q.mean[State::column(j, lane % 4)], factor[j], w.reference[j]);
  }

  static __device__ __forceinline__ void rows(const QkvAttend& p, Shared<Path>& shared, State& w) {
    const Unit& u = shared.piece.unit;
    const Items& items = shared.piece.items;
    const auto& q = shared.query;
    const auto& view = shared.view;
    const uint32_t lane = fresh_lane(), warp = threadIdx.x / 32;
    uint8_t* stage = shared.stage[warp];
    const int32_t begin = shared.piece.from + (int32_t)warp, behind = max(items.pages - begin, 0) + (int32_t)kWarps - 1;
    const int32_t from = begin + behind / (int32_t)kWarps * (int32_t)kWarps, to = min(shared.piece.to, items.pages + items.row_items + items.sinks);
    float factor[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; j++) factor[j] = q.row_factor[State::column(j, lane % 4)];
    for (int32_t i = from; i < to; i += kWarps) {
      int32_t r = i - items.pages;
      const bool window = r < items.row_items;
      const uint32_t count = window ? p.window_rows : p.sinks;
      const uint64_t at = ((uint64_t)u.s.seat * p.heads + u.head) * count;
      const uint64_t* base = window ? p.window : p.sink;
      const RowMemory keys = {(const uint8_t*)base[0] + at * (2 * DK), count};
      const RowMemory values = {(const uint8_t*)base[1] + at * (2 * DV), count};
      const int32_t first = window ? items.row_begin + kItemRows * r : 0;
      const int32_t end = window ? min(first + kItemRows, items.row_end) : min((int32_t)p.sinks, u.s.new_len);
      Path::row(q, keys, values, first, end, view, factor, p.softcap, p.window_dtype == QKV_BF16, lane, stage, w);
    }
  }

  // Items of a unit that a block has.
  static __device__ __forceinline__ void piece(const QkvAttend& p, Shared<Path>& shared) {
    const uint32_t warp = threadIdx.x / 32;
    const Unit& u = shared.piece.unit;
    Path::load(p, u, shared.query, warp, fresh_lane());
    if (threadIdx.x < Path::kUnitColumns) shared.view.set(p, u, threadIdx.x);
    const Items& items = shared.piece.items;
    const int32_t first = items.first_page + shared.piece.from, end = items.first_page + min(shared.piece.to, items.pages);
    shared.pages.load(p, u.sequence, first, end);
    if (threadIdx.x == 0) shared.pages.end = end;
    __syncthreads();
    State w;
    w.clear();
    pages(p, shared, w);
    rows(p, shared, w);
    // The merge takes the staging memory.
    __syncthreads();
    merge_warps<DV, Path::kUnitColumns>(p, u, shared.piece.place, w, shared.merge, threadIdx.x / 32, fresh_lane());
  }
};

template <class Path>
__device__ __forceinline__ void attend(const QkvAttend& p) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *(Shared<Path>*)memory;
  for_pieces(p, shared.cursor, shared.piece, [&] { Attend<Path>::piece(p, shared); });
}

}  // namespace qkv
