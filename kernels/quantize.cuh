// Affine quantization of a tensor [tokens, heads, dim]: codes clamp(rne((x - min) / step), 0, 2^bits - 1) and pairs (step, min)
// by the format's fit, or codes for given pairs.
//
// A block takes one unit at a time (QkvQuantize): it reads the unit's elements as f32 to shared memory, rotates them, fits the
// groups in registers (`encode.cuh`), and packs the codes. In row order a unit writes contiguous bytes: neighbouring rows per
// token, a span of channels of every token per channel; in fragment order a section of codes and one of pairs (`pack.cuh`).
// Where f32 rows of a whole tile would take too much shared memory they pass through it in chunks; codes and pairs stay.
#pragma once
#include "encode.cuh"
#include "pack.cuh"
#include "stage.cuh"

namespace qkv {

// Tokens of a batch row in runs of `length`.
struct Run {
  uint64_t index;
  uint64_t token;
  uint32_t count;
};

__device__ __forceinline__ Run run_of(const QkvTensor& t, uint64_t index, uint32_t length) {
  uint64_t each = (t.batch_tokens + length - 1) / length, batch = index / each, first = (index - batch * each) * length;
  return {index, batch * t.batch_tokens + first, (uint32_t)min((uint64_t)length, t.batch_tokens - first)};
}

__device__ __forceinline__ uint64_t runs_of(const QkvTensor& t, uint32_t length) {
  return t.tokens / t.batch_tokens * ((t.batch_tokens + length - 1) / length);
}

// What a unit is: its part of the tensor, and where its output begins.
struct Work {
  Part part;
  // Per channel: number of the part's first token group.
  uint64_t group;
  uint8_t* codes;
  uint64_t tile;
};

__device__ __forceinline__ Work work_of(const QkvQuantize& p, uint64_t unit) {
  Work w;
  w.group = w.tile = 0;
  w.codes = (uint8_t*)p.codes;
  if (p.order == QKV_ORDER_FRAGMENT) {
    // Heads of a tile one after the other: their rows are neighbours.
    const uint64_t tile = unit / p.x.heads;
    const uint32_t head = unit - tile * p.x.heads;
    const Run run = run_of(p.x, tile, QKV_TILE);
    w.part = {run.token, head, 0, run.count, p.x.dim, false};
    w.tile = head * runs_of(p.x, QKV_TILE) + tile;
    if (p.format.per_channel) {
      const uint64_t each = (p.x.batch_tokens + p.format.group - 1) / p.format.group, batch = run.token / p.x.batch_tokens;
      w.group = batch * each + (run.token - batch * p.x.batch_tokens) / p.format.group;
    }
    w.codes += w.tile * p.at.code_bytes;
  } else if (p.format.per_channel) {
    const uint64_t rows = (uint64_t)p.row_count * p.row_units;
    w.group = unit / rows;
    const Run run = run_of(p.x, w.group, p.format.group);
    const uint64_t inside = unit - w.group * rows;
    const uint32_t row = inside / p.row_units, first = (inside - (uint64_t)row * p.row_units) * p.width;
    // A row of codes is a head, or all of them.
    const uint32_t head = p.row_count > 1 ? row : first / p.x.dim;
    const uint32_t channel = p.row_count > 1 ? first : first - head * p.x.dim;
    w.part = {run.token, head, channel, run.count, min(p.width, p.row_channels - first), false};
    w.codes += (run.token * p.row_count + row) * p.row_bytes + (uint64_t)first * p.format.bits / 8;
  } else {
    const uint64_t row = unit * p.rows, left = p.x.tokens * p.x.heads - row, token = row / p.x.heads;
    w.part = {token, (uint32_t)(row - token * p.x.heads), 0, (uint32_t)min((uint64_t)p.rows, left), p.x.dim, true};
    w.codes += row * p.row_bytes;
  }
  return w;
}

// Place of a unit's pair in the row order of the whole tensor; `outer`, `inner` = row, group or token group, channel.
__device__ __forceinline__ uint64_t pair_place(const QkvQuantize& p, const Work& w, uint32_t outer, uint32_t inner) {
  if (p.format.per_channel) {
    const uint32_t c = w.part.channel + inner, head = c / p.x.dim;
    return ((w.part.head + head) * runs_of(p.x, p.format.group) + w.group + outer) * p.x.dim + (c - head * p.x.dim);
  }
  const uint32_t groups = (p.x.dim + p.format.group - 1) / p.format.group;
  const uint64_t row = w.part.heads_are_rows ? w.part.token * p.x.heads + w.part.head + outer
                                             : (w.part.token + outer) * p.x.heads + w.part.head;
  return row * groups + inner;
}

template <int R>
__device__ __forceinline__ void quantize(const QkvQuantize& p, uint8_t* memory) {
  float* x = (float*)memory;
  uint8_t* codes = memory + p.codes_at;
  uint32_t* pairs = (uint32_t*)(memory + p.pairs_at);
  float2* given = p.given ? (float2*)pairs : nullptr;
  const QkvFormat& f = p.format;
  const bool per_channel = f.per_channel, fragment = p.order == QKV_ORDER_FRAGMENT;
  __shared__ uint32_t total;
  // In shared memory, so that it takes no registers while groups are fitted.
  __shared__ Work w;
  const Part& part = w.part;
  uint32_t clamped = 0;
  if (threadIdx.x == 0) total = 0;
  for (uint64_t unit = blockIdx.x; unit < p.units; unit += gridDim.x) {
    if (threadIdx.x == 0) w = work_of(p, unit);
    __syncthreads();
    // Pairs [outer][inner].
    const uint32_t length = per_channel ? part.count : part.width, along = (length + f.group - 1) / f.group;
    const uint32_t outer = per_channel ? along : part.count, inner = per_channel ? part.width : along;
    if (given) {
      for (uint32_t i = threadIdx.x; i < outer * inner; i += blockDim.x) {
        const uint32_t o = i / inner;
        given[i] = __ldg((const float2*)p.given + pair_place(p, w, o, i - o * inner));
      }
    }
    // What no group writes: rows behind the last token of a tile, and the last bytes of a row that packing reads.
    if (fragment) {
      const uint32_t words = p.code_stride / 4;
      for (uint32_t i = part.count * words + threadIdx.x; i < QKV_TILE * words; i += blockDim.x) ((uint32_t*)codes)[i] = 0;
      if (!given) {
        for (uint32_t i = outer * inner + threadIdx.x; i < p.at.pair_count; i += blockDim.x) pairs[i] = 0;
      }
    } else if (part.width % 32 != 0) {
      const uint32_t end = min((part.width + 31) / 32 * 32, p.code_stride), gap = end - part.width;
      for (uint32_t i = threadIdx.x; i < part.count * gap; i += blockDim.x) {
        const uint32_t row = i / gap;
        codes[row * p.code_stride + part.width + i - row * gap] = 0;
      }
    }
    const uint32_t whole = per_channel ? part.width : part.count;
    for (uint32_t first = 0; first < whole; first += p.chunk) {
      Part now = part;
      const uint32_t n = min(p.chunk, whole - first);
      if (per_channel) {
        now.channel += first;
        now.width = n;
      } else if (part.heads_are_rows) {
        now.head += first;
        now.count = n;
      } else {
        now.token += first;
        now.count = n;
      }
      load_part(p.x, now, x, p.x_stride);
      __syncthreads();
      const Unit u = {x, p.x_stride, now.count, now.width, 0};
      if (f.rotate) {
        transform_rows(f, u, nullptr, false);
        __syncthreads();
      }
      const uint32_t pair = per_channel ? first : first * inner;
      clamped += encode_groups<R>(f, u, codes + first * (per_channel ? 1 : p.code_stride), p.code_stride, pairs + pair, inner,
                                  given ? given + pair : nullptr);
      __syncthreads();
    }
    if (fragment) {
      const uint32_t units = code_units(f, p.at), all = units + (given ? 0 : pair_units(f, p.at));
      for (uint32_t i = threadIdx.x / 32; i < all; i += blockDim.x / 32) {
        if (i < units) {
          move_codes<true>(f, p.at, codes, p.code_stride, i, w.codes);
        } else {
          move_pairs<true>(f, p.at, pairs, i - units, (uint8_t*)p.pairs + w.tile * p.at.pair_bytes);
        }
      }
    } else {
      // The elements are done with, so their memory takes the packed rows.
      const uint32_t bytes = (part.width * f.bits + 7) / 8;
      pack_rows(f.bits, codes, p.code_stride, part.count, part.width, memory, bytes);
      __syncthreads();
      store_rows(w.codes, per_channel ? (uint64_t)p.row_count * p.row_bytes : bytes, memory, part.count, bytes);
      if (!given && per_channel) {
        for (uint32_t i = threadIdx.x; i < inner; i += blockDim.x) {
          ((uint32_t*)p.pairs)[pair_place(p, w, 0, i)] = pairs[i];
        }
      } else if (!given) {
        const uint32_t pair_bytes = outer * inner * 4;
        store_rows((uint8_t*)((uint32_t*)p.pairs + pair_place(p, w, 0, 0)), pair_bytes, (const uint8_t*)pairs, 1, pair_bytes);
      }
    }
    __syncthreads();
  }
  if (p.clamped && clamped) atomicAdd(&total, clamped);
  __syncthreads();
  if (p.clamped && threadIdx.x == 0 && total) atomicAdd((unsigned long long*)p.clamped, (unsigned long long)total);
}

}  // namespace qkv
