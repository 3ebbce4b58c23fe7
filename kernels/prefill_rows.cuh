// Tiles of exact rows: sinks, window and new tokens, as they are (see prefill_stage.cuh).
#pragma once
#include "prefill_stage.cuh"

namespace qkv {

// Exact rows of a sequence, counted in slots: the sinks (where tiles are closed), then the tokens behind the closed tiles, the
// newest of them from the input.
struct ExactRows {
  const QkvPrefill& p;
  int op;
  uint32_t seat, head;
  int32_t first_row, old_len, packed, sink_slots;

  __device__ __forceinline__ const QkvTensor& input() const { return p.input[op]; }
  // QKV_ROWS_* of the input.
  __device__ __forceinline__ uint32_t kind() const { return p.input_rows >> 2 * op; }
  __device__ __forceinline__ uint32_t dim() const { return p.at[op].dim; }
  __device__ __forceinline__ int32_t token(int32_t slot) const { return slot < sink_slots ? slot : slot - sink_slots + packed; }
};

// One exact row: f16 or bf16.
struct ExactRow {
  const uint16_t* at;
  int64_t stride;
  uint32_t dtype;
  bool vectors;
};

__device__ __forceinline__ ExactRow exact_row(const ExactRows& r, int32_t slot) {
  const int32_t token = r.token(slot);
  if (token >= r.old_len) {
    const QkvTensor& input = r.input();
    const uint16_t* at = (const uint16_t*)input.data + row_offset(input, r.first_row + (token - r.old_len), r.head);
    return {at, input.strides[3], input.dtype, (r.kind() & QKV_ROWS_VECTORS) != 0};
  }
  const bool sink = token < (int32_t)r.p.sinks;
  const uint64_t seat_head = (uint64_t)r.seat * r.p.heads + r.head;
  const uint64_t row = sink ? seat_head * r.p.sinks + token : seat_head * r.p.window_rows + token % r.p.window_rows;
  const uint16_t* rows = (const uint16_t*)(sink ? r.p.sink[r.op] : r.p.window[r.op]);
  return {rows + row * r.dim(), 1, r.p.window_dtype, true};
}

// Eight channels of a row from c on; all channels of a vector exist, as heads are multiples of 16 channels.
__device__ __forceinline__ uint4 load8(const ExactRow& r, uint32_t c) {
  if (r.vectors) return __ldg((const uint4*)(r.at + c));
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint16_t* p = r.at + (int64_t)(c + 2 * i) * r.stride;
    w[i] = __ldg((const unsigned short*)p) | (uint32_t)__ldg((const unsigned short*)(p + r.stride)) << 16;
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Stages slots first .. first + count (64 at most); the rest of the tile is 0. A lane has rows l mod 8 of a warp's eight and every
// fourth vector: the lanes of a phase write in different banks, a warp reads whole sectors.
template <int D>
__device__ __forceinline__ void stage_rows(Staged& s, const ExactRows& r, int32_t first, int32_t count, bool bf16) {
  const uint32_t lane = threadIdx.x % 32, base = threadIdx.x / 32 * 8 + lane % 8, column = lane / 8 * 8;
  if (!bf16 && (r.kind() & QKV_ROWS_VECTORS)) {
    s.factor = 1.0f;
    const uint32_t to = s.address + 2 * column;
    const int32_t fresh = r.token(first) - r.old_len;
    const QkvTensor& input = r.input();
    const bool regular = fresh >= 0 && (r.kind() & QKV_ROWS_EVEN);
    const uint16_t* start = (const uint16_t*)input.data + (int64_t)(r.first_row + fresh) * input.strides[1] +
                            (int64_t)r.head * input.strides[2] + column;
#pragma unroll 1
    for (uint32_t row = base; row < QKV_TILE; row += blockDim.x / 4) {
      const bool live = (int32_t)row < count;
      const uint16_t* from = start + (live ? row : 0) * input.strides[1];
      if (!regular) from = exact_row(r, first + (live ? row : 0)).at + column;
#pragma unroll
      for (uint32_t c = 0; c < D; c += 32) {
        const bool there = live && column + c < r.dim();
        copy_async(to + row * kRowBytes<D> + 2 * c, from + c, there);
      }
    }
    return;
  }
  float down = 1.0f;
  s.factor = 1.0f;
  if (bf16) {
    float most = 0.0f;
#pragma unroll 1
    for (uint32_t row = base; (int32_t)row < count; row += blockDim.x / 4) {
      const ExactRow from = exact_row(r, first + row);
#pragma unroll
      for (uint32_t c = column; c < D; c += 32) {
        if (c >= r.dim()) continue;
        const uint4 x = load8(from, c);
        const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float2 y = from.dtype == QKV_BF16 ? bfloats(w[i])
                                            : make_float2(half_to_float((uint16_t)w[i]), half_to_float((uint16_t)(w[i] >> 16)));
          most = larger(larger(most, y.x), y.y);
        }
      }
    }
    choose_unit(s, block_max(s, most));
    down = power_of_two(-s.unit);
    s.factor = power_of_two(s.unit);
  }
#pragma unroll 1
  for (uint32_t row = base; row < QKV_TILE; row += blockDim.x / 4) {
    const bool live = (int32_t)row < count;
    const ExactRow from = exact_row(r, first + (live ? row : 0));
#pragma unroll
    for (uint32_t c = column; c < D; c += 32) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (live && c < r.dim()) x = load8(from, c);
      if (bf16) {
        uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float2 y = from.dtype == QKV_BF16 ? bfloats(w[i])
                                            : make_float2(half_to_float((uint16_t)w[i]), half_to_float((uint16_t)(w[i] >> 16)));
          w[i] = pack_half2(y.x * down, y.y * down);
        }
        x = make_uint4(w[0], w[1], w[2], w[3]);
      }
      *(uint4*)(s.tile + row * kRowBytes<D> + 2 * c) = x;
    }
  }
}

}  // namespace qkv
