// Attention of a step's new tokens over what their sequence held before the step, decoded, and over themselves, exact: flash
// attention (Dao 2023) over tiles of 64 tokens.
//
// A block has 64 or 128 query rows of one kv head of one sequence; a row is a (new token, query head of the group), so a group shares
// its keys and values. A warp has 16 rows; where values have more than 128 channels, whose sums would not fit the registers, two
// warps share them, each with one half of the channels (and both with the scores). All warps stage a tile together: with 128 rows
// that costs a product half as much. Tiles of closed pages come first, then the exact rows: sinks, window, new tokens (`ExactRows`).
// Tiles outside what any row sees are skipped, tiles that all rows see wholly take no mask. A row's bits do not depend on the rows
// beside it: tiles begin at the same tokens for all blocks. (bf16 values so far apart that bits are lost are an exception.)
//
// Rotated keys: their pages are scored by the rotated query. Rotated values: sums of pages are rotated back once, before exact rows
// join. Centred keys: the mean joins the score as q · mean, which costs nothing, being added with the maximum. Queries are
// multiplied by a power of two a row, so that f16 holds them, whatever the model's type.
//
// A weight is 2^(score - maximum + 7): the 7 keeps small ones out of f16's subnormal numbers. The maximum is followed at once, so
// that the weight of a score that outweighs all others is a power of two, which f16 holds: sums are of weights as they are, not as
// f16 rounds them, which keeps the LSE exact.
//
// A value that is no number must not reach rows that do not see its token, and 0 * NaN is NaN: in tiles with a mask such values
// are looked for, set to 0, and the sums of rows that do see them are set to NaN.
#pragma once
#include "prefill_decode.cuh"
#include "prefill_queries.cuh"
#include "prefill_rows.cuh"
#include "prefill_tile.cuh"

namespace qkv {

// Tokens that a query sees.
__device__ __forceinline__ Span visible(const QkvPrefill& p, int32_t position, int32_t total) {
  Span s = {p.sliding_window ? max(position + 1 - (int32_t)p.sliding_window, 0) : 0, position + 1};
  for (uint32_t i = 0; i < p.ranges; i++) {
    const int32_t *range = (const int32_t*)p.bidirectional + 2 * i, start = __ldg(range), end = __ldg(range + 1);
    if (start <= position && position < end) {
      s.from = min(s.from, max(start, 0));
      s.to = max(s.to, end);
    }
  }
  s.to = min(s.to, total);
  return s;
}

// A tile: 64 columns, from token (page) or slot `first`; `count` of them exist. A page lies in `block`.
struct Tile {
  bool page;
  int32_t first, count;
  uint32_t block;
};

// Columns [from, to) of a tile that a row sees.
__device__ __forceinline__ Span columns(int32_t packed, int32_t sink_slots, const Tile& tile, Span s) {
  if (tile.page) {
    return {max(s.from, sink_slots) - tile.first, min(s.to, packed) - tile.first};
  }
  // Tokens that lie in pages have no slot.
  auto slot = [&](int32_t token) {
    return token < packed ? min(token, sink_slots) : token - packed + sink_slots;
  };
  return {slot(s.from) - tile.first, slot(s.to) - tile.first};
}

__device__ __forceinline__ bool sees(Span s, int32_t column) { return column >= s.from && column < s.to; }

template <int DK, int DV>
__device__ __forceinline__ void prefill(const QkvPrefill& p, uint8_t* shared) {
  using S = PrefillShared<DK, DV>;
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // The warp's 16 rows of the block's, its first value channel, and its number of sums.
  const uint32_t sets = S::rows() / 16, warp = S::kSharing == 1 ? threadIdx.x / 32 : threadIdx.x / 32 % sets;
  const uint32_t channel = S::kSharing == 1 ? 0 : threadIdx.x / 32 / sets * S::kSummed;
  constexpr int N = S::kSummed / 8;
  Work w;
  // The last rows see most: they begin first.
  const uint32_t unit = blockIdx.x / p.row_blocks, row_block = p.row_blocks - 1 - blockIdx.x % p.row_blocks;
  w.head = unit % p.heads;
  w.sequence = unit / p.heads;
  w.s = ((const QkvSequence*)p.step)[w.sequence];
  QkvStatus* status = (QkvStatus*)p.status;
  if (w.s.tokens > (int32_t)p.max_query_len && row_block == 0 && w.head == 0 && threadIdx.x == 0) {
    atomicAdd(&status->bad_rows, 1);
  }
  w.first = row_block * S::rows();
  w.rows = min(w.s.tokens, (int32_t)p.max_query_len) * p.group;
  // Rows of the step buffer are below the tensors' own; a buffer of another step could name others.
  if (w.first >= w.rows || w.s.first_row < 0 || w.s.first_row + w.s.tokens > (int32_t)p.rows) return;

  const int32_t total = w.s.old_len + w.s.tokens, packed = w.s.old_packed;
  const int32_t sink_slots = packed > 0 ? min((int32_t)p.sinks, packed) : 0;
  // Made where it is needed: it would hold many registers.
  auto exact = [&](int op) {
    return ExactRows{p, op, (uint32_t)max(w.s.seat, 0), w.head, w.s.first_row, w.s.old_len, packed, sink_slots};
  };
  // Rows in bf16: the window's and sinks', and the input's.
  const bool bf16 = (p.window_dtype == QKV_BF16 && w.s.old_len > (p.window_rows ? 0 : packed)) || p.input[0].dtype == QKV_BF16;
  const bool bf16_values =
      (p.window_dtype == QKV_BF16 && w.s.old_len > (p.window_rows ? 0 : packed)) || p.input[1].dtype == QKV_BF16;

  // What the rows see: a lane looks at up to four of them.
  Span span[4], any = {INT32_MAX, 0}, all = {0, INT32_MAX};
#pragma unroll
  for (uint32_t i = 0; i < 4; i++) {
    const int32_t flat = w.first + (int32_t)(32 * i + lane);
    span[i] = {0, 0};
    if (32 * i < S::rows() && flat < w.rows) {
      span[i] = visible(p, w.s.old_len + flat / (int32_t)p.group, total);
      any = {min(any.from, span[i].from), max(any.to, span[i].to)};
      all = {max(all.from, span[i].from), min(all.to, span[i].to)};
    }
  }
  any = {__reduce_min_sync(0xffffffff, any.from), __reduce_max_sync(0xffffffff, any.to)};
  all = {__reduce_max_sync(0xffffffff, all.from), __reduce_min_sync(0xffffffff, all.to)};
  // This thread's rows are g and g + 8 of the warp's.
  auto mine = [&](uint32_t r) {
    Span mine = {0, 0};
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      const Span s = {__shfl_sync(0xffffffff, span[i].from, r % 32), __shfl_sync(0xffffffff, span[i].to, r % 32)};
      if (r / 32 == i) mine = s;
    }
    return mine;
  };
  const Span upper = mine(16 * warp + g), lower = mine(16 * warp + g + 8);

  // Tiles: pages that hold something to see, then exact rows.
  const int32_t page_from = max(any.from, sink_slots), page_to = min(any.to, packed);
  const int32_t first_page = page_from / QKV_TILE, pages = page_from < page_to ? (page_to + QKV_TILE - 1) / QKV_TILE - first_page : 0;
  Span slots = columns(packed, sink_slots, {false, 0, 0, 0}, any);
  // Tiles of exact rows begin at the same rows for all blocks, however many rows these have.
  slots.from = max(slots.from, 0) / QKV_TILE * QKV_TILE;
  const int32_t tiles = pages + (max(slots.to - slots.from, 0) + QKV_TILE - 1) / QKV_TILE;
  // Tokens of pages, and slots, that all rows see.
  const Span whole_pages = {max(all.from, sink_slots), min(all.to, packed)};
  const Span whole_slots = columns(packed, sink_slots, {false, 0, 0, 0}, all);
  const uint32_t no_block = p.blocks;
  const uint32_t first_seen = (uint32_t)first_page_of(p, w.s);
  auto tile_at = [&](int32_t i) {
    Tile x;
    x.page = i < pages;
    x.block = no_block;
    if (x.page) {
      const int32_t page = first_page + i;
      x.first = page * QKV_TILE;
      x.count = min(packed - x.first, QKV_TILE);
      if (page < (int32_t)p.table_width) {
        const int32_t* table = (const int32_t*)p.block_tables + (uint64_t)w.sequence * p.table_width;
        x.block = min((uint32_t)__ldg(table + page), no_block);
      }
    } else {
      x.first = slots.from + (i - pages) * QKV_TILE;
      x.count = min(slots.to - x.first, QKV_TILE);
    }
    return x;
  };
  auto page_data = [&](uint32_t block) {
    return (const uint8_t*)p.pages + ((uint64_t)block * p.heads + w.head) * p.page_bytes;
  };
  float* scratch = (float*)(shared + S::kKey + 2 * DK);
  // Kept, since it is made by several instructions.
  uint32_t base = shared_address(shared);
  asm volatile("" : "+r"(base));
  Staged keys = staged_operand<DK>(p, 0, w.head, shared + S::kKey, base + S::kKey, scratch, kRowBytes<DK> / 4);
  Staged values = staged_operand<DV>(p, 1, w.head, shared + S::kValue, base + S::kValue, scratch, kRowBytes<DK> / 4);

  // Channels that the head does not have: pages do not write them.
  auto clear_keys = [&] {
    const uint32_t vectors = (DK - p.at[0].dim) / 8;
    for (uint32_t i = threadIdx.x; i < QKV_TILE * vectors; i += blockDim.x) {
      *(uint4*)(keys.tile + i / vectors * kRowBytes<DK> + 2 * p.at[0].dim + i % vectors * 16) = make_uint4(0, 0, 0, 0);
    }
  };
  if (pages > 0) {
    clear_keys();
    for (uint32_t i = threadIdx.x; i < (DV - p.at[1].dim) * 8; i += blockDim.x) {
      ((uint4*)(values.tile + p.at[1].dim * kChannelBytes))[i] = make_uint4(0, 0, 0, 0);
    }
  }

  float out[N][4], reference[2] = {-kInfinity, -kInfinity}, sum[2] = {0.0f, 0.0f}, out_factor = 1.0f;
#pragma unroll
  for (int n = 0; n < N; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.0f;
  const uint32_t queries = base + S::kQuery + (16 * warp + (lane & 15)) * kRowBytes<DK> + (lane >> 4) * 16;
  const uint32_t key_rows = keys.address + ((lane & 7) + (lane >> 4) * 8) * kRowBytes<DK> + (lane >> 3 & 1) * 16;
  const uint32_t page_channels = values.address + channel * kChannelBytes;
  const uint32_t row_channels = values.address + 2 * channel;
  const uint8_t* query_row = shared + S::kQuery + (16 * warp + g) * kRowBytes<DK> + S::kRow;

  Tile tile = {false, 0, 0, no_block};
  // Whether there is a tile, and its keys are staged.
  bool live = false;
  uint32_t weights[4][4];
  // Whether this thread saw pairs that need the slow way.
  bool wide = false;
  // A tile's keys are staged while the values of the one before are weighed; so turn -1 stages the first ones only.
#pragma unroll 1
  for (int32_t i = -1; i < tiles; i++) {
    const bool page = tile.page;
    if (i == 0 || i == pages) {
      // Exact rows are as they are, for the query as it is.
      if (i > 0 && p.format[1].rotate) rotate_back(out, p.format[1].rotate);
      load_queries<DK, DV>(p, w, shared, page);
    }
    copy_wait();
    if (__syncthreads_or(wide)) {
      stage_affine_wide<false>(keys, page_data(tile.block));
      __syncthreads();
    }
    wide = false;
    if (live) {
      if (page) {
        const uint32_t ahead = (uint32_t)tile.first / QKV_TILE - first_seen;
        if (ahead < p.decoded_pages) {
          const uint8_t* from = decoded_page<DK, DV>(p, w, ahead);
          values.factor = DecodedPage<DK, DV>::factor(from, 1);
          copy_page(values.address, from + DecodedPage<DK, DV>::kValue, DecodedPage<DK, DV>::kValueBytes);
        } else {
          wide = stage_page<true>(values, page_data(tile.block));
        }
      } else {
        stage_rows<DV>(values, exact(1), tile.first, tile.count, bf16_values);
      }
      float d[8][4];
      scores<DK>(d, queries, key_rows);
      float2 factors[2] = {*(const float2*)query_row, *(const float2*)(query_row + 8 * kRowBytes<DK>)};
      float f[2], shift[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        f[r] = factors[r].x * keys.factor;
        // Never 0, which would make NaN of what is masked.
        f[r] = f[r] < 1e-37f ? 1e-37f : f[r];
        shift[r] = page ? factors[r].y : 0.0f;
      }
      if (p.softcap > 0.0f) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            d[n][e] = soft_cap(kLog2e * fmaf(d[n][e], f[e / 2], shift[e / 2]), p.softcap);
          }
        }
        f[0] = f[1] = 1.0f;
        shift[0] = shift[1] = 0.0f;
      }
      const Span whole = page ? whole_pages : whole_slots;
      const bool masked = tile.first < whole.from || tile.first + QKV_TILE > whole.to;
      if (masked) {
        const Span a = columns(packed, sink_slots, tile, upper), b = columns(packed, sink_slots, tile, lower);
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            if (!sees(e < 2 ? a : b, 8 * n + 2 * t + e % 2)) d[n][e] = -kInfinity;
          }
        }
      }
      // The largest score of each row; NaN is never larger, it comes back through the sum.
      float top[2] = {d[0][0], d[0][2]}, base[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int n = 0; n < 8; n++) top[r] = fmaxf(top[r], fmaxf(d[n][2 * r], d[n][2 * r + 1]));
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffff, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xffffffff, top[r], 2));
        top[r] = fmaf(top[r], f[r], shift[r]);
      }
      if (__any_sync(0xffffffff, top[0] > reference[0] || top[1] > reference[1])) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const bool moves = top[r] > reference[r];
          const float down = moves ? exp2_fast(reference[r] - top[r]) : 1.0f;
          reference[r] = moves ? top[r] : reference[r];
          sum[r] *= down;
#pragma unroll
          for (int n = 0; n < N; n++) out[n][2 * r] *= down, out[n][2 * r + 1] *= down;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        base[r] = shift[r] - (reference[r] == -kInfinity ? 0.0f : reference[r]) + kLift;
#pragma unroll
        for (int n = 0; n < 8; n++) {
          const float x = exp2_fast(fmaf(d[n][2 * r], f[r], base[r])), y = exp2_fast(fmaf(d[n][2 * r + 1], f[r], base[r]));
          sum[r] += x + y;
          weights[n / 2][n % 2 * 2 + r] = pack_half2(x, y);
        }
      }

      copy_wait();
      if (__syncthreads_or(wide)) {
        stage_affine_wide<true>(values, page_data(tile.block));
        __syncthreads();
      }
      if (masked && __syncthreads_or(values_not_finite<DV>(values.tile, page))) {
        poison<DV>(out, values.tile, page, (uint32_t*)keys.tile, channel, columns(packed, sink_slots, tile, upper), columns(packed, sink_slots, tile, lower));
        clear_keys();
        // Keys may be copied with what was cleared.
        __syncthreads();
      }
      if (values.factor != out_factor) {
        const float ratio = i == 0 ? 0.0f : out_factor / values.factor;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
          for (int e = 0; e < 4; e++) out[n][e] *= ratio;
        }
        out_factor = values.factor;
      }
      wide = false;
    } else if (i >= 0 && threadIdx.x == 0) {
      // A page that does not exist is left out and counted.
      atomicAdd(&status->missing_blocks, 1);
    }
    const bool weighs = live;
    if (i + 1 < tiles) {
      tile = tile_at(i + 1);
      live = !tile.page || tile.block != no_block;
      if (!tile.page) {
        stage_rows<DK>(keys, exact(0), tile.first, tile.count, bf16);
      } else if (live) {
        const uint32_t ahead = (uint32_t)tile.first / QKV_TILE - first_seen;
        if (ahead < p.decoded_pages) {
          const uint8_t* from = decoded_page<DK, DV>(p, w, ahead);
          keys.factor = DecodedPage<DK, DV>::factor(from, 0);
          copy_page(keys.address, from, DecodedPage<DK, DV>::kValue);
        } else {
          wide = stage_page<false>(keys, page_data(tile.block));
        }
      }
    }
    if (weighs && page) weigh<DV, true>(out, weights, page_channels);
    if (weighs && !page) weigh<DV, false>(out, weights, row_channels);
  }

  // The sink logit joins, sums of the lanes of a row come together; rows go out by way of shared memory.
  __syncthreads();
  float* rows = (float*)shared;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int32_t flat = w.first + 16 * warp + g + 8 * r;
    float l = sum[r], m = (reference[r] == -kInfinity ? 0.0f : reference[r]) - kLift, factor = out_factor;
    l += __shfl_xor_sync(0xffffffff, l, 1);
    l += __shfl_xor_sync(0xffffffff, l, 2);
    const uint32_t head = w.head * p.group + flat % p.group;
    if (p.sink_logits) {
      const float logit = __ldg((const float*)p.sink_logits + head) * kLog2e;
      if (logit != -kInfinity) {
        const float high = l == 0.0f ? logit : fmaxf(m, logit), down = l == 0.0f ? 0.0f : exp2_fast(m - high);
        l = l * down + exp2_fast(logit - high);
        factor *= down;
        m = high;
      }
    }
    const bool nothing = l == 0.0f;
    factor = nothing ? 0.0f : factor / l;
#pragma unroll
    for (int n = 0; n < N; n++) {
      *(float2*)(rows + (16 * warp + g + 8 * r) * (DV + 8) + channel + 8 * n + 2 * t) = make_float2(out[n][2 * r] * factor, out[n][2 * r + 1] * factor);
    }
    if (p.lse && t == 0 && channel == 0 && flat < w.rows) {
      const uint64_t token = w.s.first_row + flat / p.group;
      ((float*)p.lse)[token * p.out.heads + head] = nothing ? -kInfinity : (m + log2f(l)) * kLn2;
    }
  }
  __syncthreads();
  const bool vectors = rows_are_vectors(p.out);
#pragma unroll 1
  for (uint32_t r = threadIdx.x / 32; r < S::rows(); r += blockDim.x / 32) {
    const int32_t flat = w.first + (int32_t)r;
    if (flat >= w.rows) break;
    const int64_t at = row_offset(p.out, w.s.first_row + flat / p.group, w.head * p.group + flat % p.group);
#pragma unroll 1
    for (uint32_t c = 4 * lane; c < p.out.dim; c += 128) {
      const float4 v = *(const float4*)(rows + r * (DV + 8) + c);
      const float x[4] = {v.x, v.y, v.z, v.w};
      if (vectors) {
        store4(p.out, at + c, x);
      } else {
#pragma unroll
        for (int k = 0; k < 4; k++) store_element(p.out, at + (c + k) * p.out.strides[3], x[k]);
      }
    }
  }
}

}  // namespace qkv

extern __shared__ uint4 prefill_shared[];

// An instance: heads of up to DK and DV channels, registers for 4 BLOCKS warps an SM; and the kernel that decodes pages for it.
#define QKV_PREFILL(DK, DV, BLOCKS)                                                        \
  extern "C" __global__ void __launch_bounds__(128, 2) qkv_prefill_decode_##DK##_##DV(const __grid_constant__ QkvPrefill p) { \
    qkv::decode_pages<DK, DV>(p, (uint8_t*)prefill_shared);                                \
  }                                                                                        \
  extern "C" __global__ void __launch_bounds__(128 * BLOCKS, 1) qkv_prefill_##DK##_##DV(      \
      const __grid_constant__ QkvPrefill p) {                                             \
    qkv::prefill<DK, DV>(p, (uint8_t*)prefill_shared);                                     \
  }
