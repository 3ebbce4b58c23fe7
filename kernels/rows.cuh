// Rows of codes in row order: a dense bit stream a row, low bits first, row after row in one contiguous range of global memory.
// The buffers in shared memory are those of `pack.cuh`: a byte a code, (code_stride / 4) % 32 == 4.
//
// Where rows are whole 16-byte vectors (the usual heads), a lane takes a vector, and the 8
// lanes of a phase take 8 neighbouring rows: these begin in different banks, so 16-byte accesses of shared memory never
// meet, and a warp still covers whole sectors of each row. Rows of whole words: a lane takes a word, in the order of memory.
// Others, and addresses that are not aligned: a byte a lane.
#pragma once
#include "layout.cuh"

namespace qkv {

// The low `Bits` bits of four bytes side by side, and back.
template <int Bits>
__device__ __forceinline__ uint32_t pack4(uint32_t x) {
  if constexpr (Bits == 8) {
    return x;
  } else {
    constexpr uint32_t kTwo = ((1u << (2 * Bits)) - 1) * 0x00010001u;
    x = (x | x >> (8 - Bits)) & kTwo;
    return (x | x >> (16 - 2 * Bits)) & ((1u << (4 * Bits)) - 1);
  }
}

template <int Bits>
__device__ __forceinline__ uint32_t unpack4(uint32_t x) {
  if constexpr (Bits == 8) {
    return x;
  } else {
    constexpr uint32_t kOne = ((1u << Bits) - 1) * 0x01010101u, kTwo = (1u << (2 * Bits)) - 1;
    x = (x & kTwo) | (x << (16 - 2 * Bits) & kTwo << 16);
    return (x | x << (8 - Bits)) & kOne;
  }
}

// 16 codes as `Bits` / 2 words' worth of bits: four times 4 * Bits.
template <int Bits>
__device__ __forceinline__ void pack16(uint4 c, uint32_t (&q)[4]) {
  q[0] = pack4<Bits>(c.x), q[1] = pack4<Bits>(c.y), q[2] = pack4<Bits>(c.z), q[3] = pack4<Bits>(c.w);
}

// Vector `v` of a row of packed codes, from the row's bytes.
template <int Bits>
__device__ __forceinline__ uint4 pack_vector_codes(const uint8_t* row, uint32_t v) {
  [[maybe_unused]] uint32_t q[4], w[4];
  if constexpr (Bits == 3) {
    // Vectors begin at codes 0, 42 2/3, 85 1/3 of 128: 16 codes (48 bits) at a time from code 0, 32, 80 on, then a shift.
    uint32_t third = v % 3, first = 8 * (v / 3) + (third == 0 ? 0 : third == 1 ? 2 : 5);
    const uint4* c = (const uint4*)row + first;
    uint32_t s[7] = {};
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      if (i == 3 && third != 1) break;
      pack16<3>(c[i], q);
      uint32_t low = q[0] | q[1] << 12 | q[2] << 24, high = q[2] >> 8 | q[3] << 4;
      if (i % 2 == 0) {
        s[i / 2 * 3] = low;
        s[i / 2 * 3 + 1] = high;
      } else {
        s[i / 2 * 3 + 1] |= low << 16;
        s[i / 2 * 3 + 2] = low >> 16 | high << 16;
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      w[i] = third == 0 ? s[i] : third == 1 ? s[i + 1] : __funnelshift_r(s[i], s[i + 1], 16);
    }
  } else if constexpr (Bits == 8) {
    return ((const uint4*)row)[v];
  } else {
    const uint4* c = (const uint4*)row + v * (8 / Bits);
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) w[i] = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8 / Bits; i++) {
      pack16<Bits>(c[i], q);
#pragma unroll
      for (uint32_t j = 0; j < 4; j++) {
        uint32_t bit = (4 * i + j) * 4 * Bits;
        w[bit / 32] |= q[j] << (bit % 32);
      }
    }
  }
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// The inverse, except for 3 bits.
template <int Bits>
__device__ __forceinline__ void unpack_vector_codes(uint4 x, uint8_t* row, uint32_t v) {
  uint4* c = (uint4*)row + v * (8 / Bits);
  uint32_t w[4] = {x.x, x.y, x.z, x.w}, q[4];
#pragma unroll
  for (uint32_t i = 0; i < 8 / Bits; i++) {
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
      uint32_t bit = (4 * i + j) * 4 * Bits;
      q[j] = unpack4<Bits>(w[bit / 32] >> (bit % 32));
    }
    c[i] = make_uint4(q[0], q[1], q[2], q[3]);
  }
}

// 16 codes of 3 bits: bits `shift` to `shift` + 47 of two words.
__device__ __forceinline__ uint4 unpack16_3(uint32_t low, uint32_t high) {
  uint32_t middle = __funnelshift_r(low, high, 24);
  return make_uint4(unpack4<3>(low), unpack4<3>(low >> 12), unpack4<3>(middle), unpack4<3>(high >> 4));
}

// Vector `v` of rows of 3 bits; all lanes of a warp, lane + 8 has the next one. Three vectors hold eight times 16 codes; two of
// those lie in two vectors each.
__device__ __forceinline__ void unpack_vector_3(uint4 x, uint8_t* row, uint32_t v, bool live) {
  uint32_t next = __shfl_down_sync(0xffffffff, x.x, 8);
  if (!live) return;
  uint4* c = (uint4*)row + 8 * (v / 3);
  switch (v % 3) {
    case 0:
      c[0] = unpack16_3(x.x, x.y);
      c[1] = unpack16_3(__funnelshift_r(x.y, x.z, 16), x.z >> 16);
      c[2] = unpack16_3(x.w, next);
      break;
    case 1:
      c[3] = unpack16_3(__funnelshift_r(x.x, x.y, 16), x.y >> 16);
      c[4] = unpack16_3(x.z, x.w);
      c[5] = unpack16_3(__funnelshift_r(x.w, next, 16), next >> 16);
      break;
    default:
      c[6] = unpack16_3(x.y, x.z);
      c[7] = unpack16_3(__funnelshift_r(x.z, x.w, 16), x.w >> 16);
  }
}

// Word `w` of a row of packed codes, from the row's bytes.
template <int Bits>
__device__ __forceinline__ uint32_t pack_word(const uint8_t* row, uint32_t w) {
  [[maybe_unused]] uint32_t q[4];
  if constexpr (Bits == 8) {
    return ((const uint32_t*)row)[w];
  } else if constexpr (Bits == 4) {
    uint2 c = ((const uint2*)row)[w];
    return pack4<4>(c.x) | pack4<4>(c.y) << 16;
  } else if constexpr (Bits == 2) {
    pack16<2>(((const uint4*)row)[w], q);
    return q[0] | q[1] << 8 | q[2] << 16 | q[3] << 24;
  } else if constexpr (Bits == 1) {
    pack16<1>(((const uint4*)row)[2 * w], q);
    uint32_t low = q[0] | q[1] << 4 | q[2] << 8 | q[3] << 12;
    pack16<1>(((const uint4*)row)[2 * w + 1], q);
    return low | (q[0] | q[1] << 4 | q[2] << 8 | q[3] << 12) << 16;
  } else {
    // 3 bits: words begin at codes 0, 10 2/3, 21 1/3 of 32.
    uint32_t third = w % 3, shift = third == 0 ? 0 : third == 1 ? 8 : 4;
    const uint32_t* c = (const uint32_t*)row + 8 * (w / 3) + (third == 0 ? 0 : third == 1 ? 2 : 5);
    uint32_t x = pack4<3>(c[0]) >> shift | pack4<3>(c[1]) << (12 - shift) | pack4<3>(c[2]) << (24 - shift);
    return third == 1 ? x | pack4<3>(c[3]) << 28 : x;
  }
}

template <int Bits>
__device__ __forceinline__ void unpack_word(uint32_t x, uint8_t* row, uint32_t w) {
  if constexpr (Bits == 8) ((uint32_t*)row)[w] = x;
  if constexpr (Bits == 4) ((uint2*)row)[w] = make_uint2(unpack4<4>(x), unpack4<4>(x >> 16));
  if constexpr (Bits <= 2) {
#pragma unroll
    for (uint32_t i = 0; i < 2 / Bits; i++) {
      uint32_t y = x >> (16 * i);
      ((uint4*)row)[2 / Bits * w + i] = make_uint4(unpack4<Bits>(y), unpack4<Bits>(y >> (4 * Bits)),
                                                   unpack4<Bits>(y >> (8 * Bits)), unpack4<Bits>(y >> (12 * Bits)));
    }
  }
}

// Byte `b` of a row of `dim` packed codes.
template <int Bits>
__device__ __forceinline__ uint8_t pack_byte(const uint8_t* row, uint32_t dim, uint32_t b) {
  uint32_t code = 8 * b / Bits, x = row[code] >> (8 * b - code * Bits);
  for (uint32_t c = code + 1; c < dim && c * Bits < 8 * b + 8; c++) x |= row[c] << (c * Bits - 8 * b);
  return (uint8_t)x;
}

// How a run of rows can be moved.
__device__ __forceinline__ bool rows_by_vectors(uint32_t bits, uint32_t dim, uint64_t address) {
  uint32_t vectors = dim * bits / 128;
  // An odd number of vectors a row would cut sectors, except where 8 rows are moved at once.
  return dim * bits % 128 == 0 && address % 16 == 0 && (vectors % 2 == 0 || vectors == 1 || vectors == 3);
}

__device__ __forceinline__ bool rows_by_words(uint32_t bits, uint32_t dim, uint64_t address) {
  return dim * bits % 32 == 0 && address % 4 == 0;
}

// Calls f(row, vector, live) so that the lanes of a phase have 8 neighbouring rows; all lanes of a warp call it together. At 3
// bits three vectors of a row are in one warp, and vector v + 1 is 8 lanes after v.
template <int Bits, typename F>
__device__ __forceinline__ void each_vector(uint32_t dim, uint32_t rows, F f) {
  const uint32_t vectors = dim * Bits / 128, lane = threadIdx.x % 32;
  const bool three = Bits == 3 || vectors == 3;
  const uint32_t per_warp = three ? 3 : 4, parts = (rows + 7) / 8 * vectors;
  for (uint32_t first = threadIdx.x / 32 * per_warp; first < parts; first += blockDim.x / 32 * per_warp) {
    uint32_t part = first + lane / 8, row = part / vectors * 8 + lane % 8;
    f(row, part % vectors, lane / 8 < per_warp && row < rows);
  }
}

template <int Bits>
__device__ __forceinline__ void write_rows_of(uint32_t dim, uint32_t rows, const uint8_t* codes, uint32_t code_stride,
                                              uint8_t* out) {
  const uint32_t row_bytes = (dim * Bits + 7) / 8;
  if (rows_by_vectors(Bits, dim, (uint64_t)out)) {
    each_vector<Bits>(dim, rows, [&](uint32_t row, uint32_t v, bool live) {
      if (live) *(uint4*)(out + row * row_bytes + 16 * v) = pack_vector_codes<Bits>(codes + row * code_stride, v);
    });
  } else if (rows_by_words(Bits, dim, (uint64_t)out)) {
    const uint32_t words = row_bytes / 4;
    for (uint32_t i = threadIdx.x; i < rows * words; i += blockDim.x) {
      ((uint32_t*)out)[i] = pack_word<Bits>(codes + i / words * code_stride, i % words);
    }
  } else {
    for (uint32_t i = threadIdx.x; i < rows * row_bytes; i += blockDim.x) {
      out[i] = pack_byte<Bits>(codes + i / row_bytes * code_stride, dim, i % row_bytes);
    }
  }
}

template <int Bits>
__device__ __forceinline__ void read_rows_of(uint32_t dim, uint32_t rows, const uint8_t* in, uint8_t* codes, uint32_t code_stride) {
  const uint32_t row_bytes = (dim * Bits + 7) / 8;
  if (rows_by_vectors(Bits, dim, (uint64_t)in)) {
    each_vector<Bits>(dim, rows, [&](uint32_t row, uint32_t v, bool live) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (live) x = *(const uint4*)(in + row * row_bytes + 16 * v);
      if constexpr (Bits == 3) {
        unpack_vector_3(x, codes + row * code_stride, v, live);
      } else {
        if (live) unpack_vector_codes<Bits>(x, codes + row * code_stride, v);
      }
    });
  } else if (Bits == 3 && rows_by_words(Bits, dim, (uint64_t)in)) {
    // 96 words are 32 times 32 codes: no code crosses their end. Within, a lane needs some bits of the next word.
    const uint32_t words = row_bytes / 4, all = rows * words, lane = threadIdx.x % 32;
    for (uint32_t first = threadIdx.x / 32 * 96; first < all; first += blockDim.x / 32 * 96) {
      uint32_t w[3];
#pragma unroll
      for (uint32_t k = 0; k < 3; k++) {
        uint32_t i = first + 32 * k + lane;
        w[k] = i < all ? ((const uint32_t*)in)[i] : 0;
      }
#pragma unroll
      for (uint32_t k = 0; k < 3; k++) {
        uint32_t i = first + 32 * k + lane, next = __shfl_down_sync(0xffffffff, w[k], 1);
        if (k < 2) {
          uint32_t over = __shfl_sync(0xffffffff, w[k < 2 ? k + 1 : 2], 0);
          next = lane == 31 ? over : next;
        }
        if (i >= all) continue;
        // Words hold four codes at a time from code 0, 12, 24 of 32 on.
        uint32_t at = i % words, third = at % 3, low = __funnelshift_r(w[k], next, 4 * third), high = next >> (4 * third);
        uint32_t* c = (uint32_t*)(codes + i / words * code_stride) + 8 * (at / 3) + 3 * third;
        c[0] = unpack4<3>(low);
        c[1] = unpack4<3>(low >> 12);
        if (third < 2) c[2] = unpack4<3>(__funnelshift_r(low, high, 24));
      }
    }
  } else if (Bits != 3 && rows_by_words(Bits, dim, (uint64_t)in)) {
    const uint32_t words = row_bytes / 4;
    for (uint32_t i = threadIdx.x; i < rows * words; i += blockDim.x) {
      unpack_word<Bits>(((const uint32_t*)in)[i], codes + i / words * code_stride, i % words);
    }
  } else {
    // Whole codes in whole bytes: one byte, or three of 3 bits.
    constexpr uint32_t kBytes = Bits == 3 ? 3 : 1, kCodes = 8 * kBytes / Bits;
    const uint32_t parts = (row_bytes + kBytes - 1) / kBytes;
    for (uint32_t i = threadIdx.x; i < rows * parts; i += blockDim.x) {
      uint32_t row = i / parts, part = i % parts, x = 0;
#pragma unroll
      for (uint32_t b = 0; b < kBytes; b++) {
        if (part * kBytes + b < row_bytes) x |= in[row * row_bytes + part * kBytes + b] << (8 * b);
      }
#pragma unroll
      for (uint32_t c = 0; c < kCodes; c++) {
        uint32_t channel = part * kCodes + c;
        if (channel < dim) codes[row * code_stride + channel] = (uint8_t)(x >> (c * Bits) & ((1u << Bits) - 1));
      }
    }
  }
}

// Writes `rows` rows of `dim` codes of 1, 2, 3, 4 or 8 bits, packed, from shared memory to `out`. Called by all threads of a
// block of whole warps; synchronises nothing. Rows of 16-bit elements are rows of twice as many 8-bit codes. A row of codes
// is 16-byte aligned.
__device__ inline void write_rows(uint32_t bits, uint32_t dim, uint32_t rows, const uint8_t* codes, uint32_t code_stride,
                                  uint8_t* out) {
  switch (bits) {
    case 1: return write_rows_of<1>(dim, rows, codes, code_stride, out);
    case 2: return write_rows_of<2>(dim, rows, codes, code_stride, out);
    case 3: return write_rows_of<3>(dim, rows, codes, code_stride, out);
    case 4: return write_rows_of<4>(dim, rows, codes, code_stride, out);
    default: return write_rows_of<8>(dim, rows, codes, code_stride, out);
  }
}

// The inverse.
__device__ inline void read_rows(uint32_t bits, uint32_t dim, uint32_t rows, const uint8_t* in, uint8_t* codes,
                                 uint32_t code_stride) {
  switch (bits) {
    case 1: return read_rows_of<1>(dim, rows, in, codes, code_stride);
    case 2: return read_rows_of<2>(dim, rows, in, codes, code_stride);
    case 3: return read_rows_of<3>(dim, rows, in, codes, code_stride);
    case 4: return read_rows_of<4>(dim, rows, in, codes, code_stride);
    default: return read_rows_of<8>(dim, rows, in, codes, code_stride);
  }
}

}  // namespace qkv
