// Decode attention: a block takes a range of items (`work.cuh`), each of its warps whole items, so the loop has no barrier: the pages
// first, then exact rows. At a unit's end the warps' results are merged. A `Path` says how scores and outputs of a page are made.
#pragma once
#include "merge.cuh"
#include "rows.cuh"

namespace qkv {

template <class Path>
struct Shared {
  Cursor cursor;
  Piece piece;
  View<Path::kUnitColumns> view;
  alignas(16) typename Path::Query query;
  union {
    alignas(16) uint8_t stage[kWarps][kStageBytes];
    MergeShared<Path::kValueDim, Path::kUnitColumns> merge;
  };
};

// Scores, which `factor` takes to log2 units, capped and masked; capped ones are in log2 units already.
template <class State, int Columns>
__device__ __forceinline__ void cap_and_mask(const QkvAttend& p, int32_t first, uint32_t lane, const View<Columns>& view,
                                             const float (&factor)[State::kColumns], float (&s)[8][State::kColumns]) {
  constexpr int Count = State::kColumns;
  if (p.softcap > 0) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
#pragma unroll
      for (int j = 0; j < Count; j++) s[i][j] = soft_cap(s[i][j] * factor[j], p.softcap);
    }
  }
  if (first < max(view.all_low, (int32_t)p.sinks) || first + QKV_TILE - 1 > view.all_high) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      int32_t token = first + 8 * i + (int32_t)lane / 4;
#pragma unroll
      for (int j = 0; j < Count; j++) {
        if (token < (int32_t)p.sinks || !view.sees(State::column(j, lane % 4), token)) s[i][j] = -kInfinity;
      }
    }
  }
}

template <class Path>
struct Attend {
  static constexpr int kColumns = Path::State::kColumns, DK = Path::kKeyDim, DV = Path::kValueDim;
  using Query = typename Path::Query;
  using State = typename Path::State;

  static __device__ __forceinline__ void pages(const QkvAttend& p, const Unit& u, const Items& items, int32_t from, int32_t to,
                                               const Query& q, const View<Path::kUnitColumns>& view, uint32_t lane, uint8_t* stage,
                                               State& w) {
    typename Path::Fold fold;
    fold.clear();
    float factor[kColumns], log2_factor[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      factor[j] = q.page_factor[State::column(j, lane % 4)];
      log2_factor[j] = p.softcap > 0 ? 1.0f : factor[j];
    }
    const int32_t* table = (const int32_t*)p.block_tables + (uint64_t)u.sequence * p.table_width;
    for (int32_t i = from; i < to; i += kWarps) {
      int32_t tile = items.first_page + i;
      uint32_t block = (uint32_t)tile < p.table_width ? (uint32_t)__ldg(table + tile) : 0xffffffff;
      if (block >= p.blocks) {
        // The tokens of a page that does not exist take no part.
        if (lane == 0) atomicAdd(&((QkvStatus*)p.status)->missing_blocks, 1);
        continue;
      }
      const uint8_t* page = (const uint8_t*)p.pages + ((uint64_t)block * p.heads + u.head) * p.page_bytes;
      float s[8][kColumns];
      Path::scores(p, q, page, lane, stage, fold, s);
      cap_and_mask<State>(p, tile * QKV_TILE, lane, view, factor, s);
      int tail = min(u.s.new_len - tile * QKV_TILE, QKV_TILE);
      Path::values(p, page, lane, tail, log2_factor, stage, s, w);
    }
  }

  static __device__ __forceinline__ void rows(const QkvAttend& p, const Unit& u, const Items& items, int32_t from, int32_t to,
                                              const Query& q, const View<Path::kUnitColumns>& view, uint32_t lane, uint8_t* stage,
                                              State& w) {
    float factor[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; j++) factor[j] = q.row_factor[State::column(j, lane % 4)];
    for (int32_t i = from; i < to; i += kWarps) {
      int32_t r = i - items.pages;
      const bool window = r < items.row_tiles;
      const uint32_t count = window ? p.window_rows : p.sinks;
      const uint64_t at = ((uint64_t)u.s.seat * p.heads + u.head) * count;
      const uint64_t* base = window ? p.window : p.sink;
      const RowMemory keys = {(const uint8_t*)base[0] + at * (2 * DK), count};
      const RowMemory values = {(const uint8_t*)base[1] + at * (2 * DV), count};
      int32_t first = window ? items.row_begin + QKV_TILE * r : 0;
      const int32_t end = window ? min(first + QKV_TILE, items.row_end) : min((int32_t)p.sinks, u.s.new_len);
#pragma unroll 1
      for (; first < end; first += 16) {
        if (p.window_dtype == QKV_BF16) {
          Path::template row<true>(q, keys, values, first, end, view, factor, p.softcap, lane, stage, w);
        } else {
          Path::template row<false>(q, keys, values, first, end, view, factor, p.softcap, lane, stage, w);
        }
      }
    }
  }

  // Items of a unit that a block has.
  static __device__ __forceinline__ void piece(const QkvAttend& p, Shared<Path>& shared, uint32_t warp, uint32_t lane) {
    const Unit& u = shared.piece.unit;
    const Items& items = shared.piece.items;
    const int32_t from = shared.piece.from, to = shared.piece.to;
    Path::load(p, u, shared.query, warp, lane);
    if (threadIdx.x < Path::kUnitColumns) shared.view.set(p, u, threadIdx.x);
    __syncthreads();
    State w;
    w.clear();
    int32_t at = from + (int32_t)warp;
    const int32_t pages_end = min(to, items.pages), rows_end = min(to, items.pages + items.row_tiles + items.sinks);
    if (at < pages_end) {
      pages(p, u, items, at, pages_end, shared.query, shared.view, lane, shared.stage[warp], w);
      Path::finish(p, u.head, lane, w);
      at += (pages_end - at + (int32_t)kWarps - 1) / (int32_t)kWarps * (int32_t)kWarps;
    }
    if (at < rows_end) rows(p, u, items, at, rows_end, shared.query, shared.view, lane, shared.stage[warp], w);
    // The merge takes the staging memory.
    __syncthreads();
    const int slot = shared.piece.from > 0 ? 0 : shared.piece.to < items.count() ? 1 : -1;
    merge_warps<DV, Path::kUnitColumns>(p, u, slot, w, shared.merge, warp, lane);
  }
};

template <class Path>
__device__ __forceinline__ void attend(const QkvAttend& p) {
  extern __shared__ __align__(16) uint8_t memory[];
  auto& shared = *(Shared<Path>*)memory;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for_pieces(p, lane, shared.cursor, shared.piece, [&] { Attend<Path>::piece(p, shared, warp, lane); });
}

}  // namespace qkv
