// Between strided tensors, rows of f32 in shared memory, and packed rows in global memory.
//
// Rows of a tensor are read as 16-byte vectors where they can be. A row is dealt out in runs of 32 channels (4 lanes of 16-bit
// elements, 8 of f32), the last one with idle lanes, so that the eight lanes of a pass over shared memory write 32 different
// banks whatever the rows are. Codes are packed to a copy of the output in shared memory, and go out from there as vectors.
#pragma once
#include "tensor.cuh"

namespace qkv {

constexpr uint32_t kNowhere = 0xffffffff;

// The part of a tensor that a unit of work holds: `count` rows of `width` channels.
struct Part {
  uint64_t token;
  uint32_t head;
  uint32_t channel;
  uint32_t count;
  uint32_t width;
  // Rows are neighbouring (token, head); otherwise neighbouring tokens, and channels go on in the next head.
  bool heads_are_rows;
};

__device__ __forceinline__ int64_t part_offset(const QkvTensor& t, const Part& p, uint32_t row, uint32_t channel) {
  uint64_t token = p.token;
  uint32_t head = p.head, c = p.channel + channel;
  if (p.heads_are_rows) {
    uint32_t h = head + row, whole = h / t.heads;
    token += whole;
    head = h - whole * t.heads;
  } else {
    token += row;
    uint32_t whole = c / t.dim;
    head += whole;
    c -= whole * t.dim;
  }
  return row_offset(t, token, head) + (int64_t)c * t.strides[3];
}

// Reads a part to x[row * stride + channel]. All threads of a block.
__device__ __forceinline__ void load_part(const QkvTensor& t, const Part& p, float* x, uint32_t stride) {
  const uint32_t runs = (p.width + 31) / 32;
  if (!rows_are_vectors(t) || stride % 4 != 0) {
    for (uint32_t i = threadIdx.x; i < p.count * runs * 32; i += blockDim.x) {
      uint32_t row = i / (runs * 32), c = i - row * runs * 32;
      if (c < p.width) x[row * stride + c] = load_element(t, part_offset(t, p, row, c));
    }
    return;
  }
  const uint32_t bytes = element_bytes(t.dtype), per = 16 / bytes, slots = runs * (32 / per);
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < p.count * slots; i += blockDim.x) {
    const uint32_t row = i / slots, c = (i - row * slots) * per;
    if (c >= p.width) continue;
    const uint4 v = __ldg((const uint4*)(t.data + part_offset(t, p, row, c) * bytes));
    float y[8];
    unpack_vector(t.dtype, v, y);
    const float4 low = make_float4(y[0], y[1], y[2], y[3]);
    float4* at = (float4*)(x + row * stride + c);
    if (t.dtype == QKV_F32) {
      *at = low;
    } else {
      // Two passes: half of the lanes begin with their second half.
      const float4 high = make_float4(y[4], y[5], y[6], y[7]);
      const uint32_t second = (threadIdx.x / 4 ^ row * stride / 4) & 1;
      at[second] = second ? high : low;
      at[1 - second] = second ? low : high;
    }
  }
}

// Four codes, one a byte, side by side.
__device__ __forceinline__ uint32_t squeeze(uint32_t bits, uint32_t w) {
  if (bits == 8) return w;
  w |= w >> (8 - bits);
  uint32_t mask = (1u << (2 * bits)) - 1;
  return (w & mask) | (w >> (16 - 2 * bits) & mask << (2 * bits));
}

// Packs rows of codes to out[row * row_bytes ..], the bytes of row order. Codes beyond `width`, up to a multiple of 32, are 0.
// Lanes follow the code buffer, gaps included, so that both sides are contiguous.
__device__ __forceinline__ void pack_rows(uint32_t bits, const uint8_t* codes, uint32_t code_stride, uint32_t rows,
                                          uint32_t width, uint8_t* out, uint32_t row_bytes) {
  // 32 codes of 3 bits, otherwise 16.
  const uint32_t codes_each = bits == 3 ? 32 : 16, bytes = codes_each * bits / 8;
  const uint32_t slots = (code_stride + codes_each - 1) / codes_each;
  const uint32_t align = bits == 3 ? 4 : bytes;
  for (uint32_t i = threadIdx.x; i < rows * slots; i += blockDim.x) {
    const uint32_t row = i / slots, s = i - row * slots;
    if (s * codes_each >= width) continue;
    const uint4* from = (const uint4*)(codes + row * code_stride + s * codes_each);
    uint32_t w[4];
    if (bits == 3) {
      const uint32_t second = (threadIdx.x / 4 ^ row * code_stride / 16) & 1;
      const uint4 p = from[second], q = from[1 - second], lo = second ? q : p, hi = second ? p : q;
      uint32_t a[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int k = 0; k < 8; k++) a[k] = squeeze(3, a[k]);
      w[0] = a[0] | a[1] << 12 | a[2] << 24;
      w[1] = a[2] >> 8 | a[3] << 4 | a[4] << 16 | a[5] << 28;
      w[2] = a[5] >> 4 | a[6] << 8 | a[7] << 20;
      w[3] = 0;
    } else {
      const uint4 v = *from;
      uint32_t a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; k++) w[k] = squeeze(bits, a[k]);
      if (bits == 4) {
        w[0] |= w[1] << 16;
        w[1] = w[2] | w[3] << 16;
      } else if (bits < 4) {
        w[0] |= w[1] << (4 * bits) | w[2] << (8 * bits) | w[3] << (12 * bits);
      }
    }
    const uint32_t left = row_bytes - s * bytes;
    uint8_t* to = out + row * row_bytes + s * bytes;
    if (left >= bytes && row_bytes % align == 0) {
      if (bits == 8) {
        *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]);
      } else if (bits == 4) {
        *(uint2*)to = make_uint2(w[0], w[1]);
      } else if (bits == 1) {
        *(uint16_t*)to = (uint16_t)w[0];
      } else {
        *(uint32_t*)to = w[0];
        if (bits == 3) {
          ((uint32_t*)to)[1] = w[1];
          ((uint32_t*)to)[2] = w[2];
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < 16; k++) {
        if (k < min(left, bytes)) to[k] = (uint8_t)(w[k / 4] >> (8 * (k % 4)));
      }
    }
  }
}

template <class Word>
__device__ __forceinline__ void store_words(uint8_t* to, uint64_t to_stride, const uint8_t* from, uint32_t rows,
                                            uint32_t row_bytes) {
  const uint32_t words = row_bytes / sizeof(Word), tail = row_bytes % sizeof(Word);
  for (uint32_t i = threadIdx.x; i < rows * words; i += blockDim.x) {
    const uint32_t row = i / words, w = i - row * words;
    ((Word*)(to + row * to_stride))[w] = ((const Word*)(from + row * row_bytes))[w];
  }
  // More than one row has no tail: `store_rows` takes a narrower word then.
  if (threadIdx.x < tail) to[words * sizeof(Word) + threadIdx.x] = from[words * sizeof(Word) + threadIdx.x];
}

// Writes rows of bytes from shared memory (side by side, 16-byte aligned), `to_stride` bytes apart in global memory.
__device__ __forceinline__ void store_rows(uint8_t* to, uint64_t to_stride, const uint8_t* from, uint32_t rows,
                                           uint32_t row_bytes) {
  if (to_stride == row_bytes) {
    row_bytes *= rows;
    rows = 1;
  }
  const uint64_t align = (uint64_t)to | (rows > 1 ? to_stride | row_bytes : 0);
  if (align % 16 == 0) return store_words<uint4>(to, to_stride, from, rows, row_bytes);
  if (align % 4 == 0) return store_words<uint32_t>(to, to_stride, from, rows, row_bytes);
  store_words<uint8_t>(to, to_stride, from, rows, row_bytes);
}

}  // namespace qkv
