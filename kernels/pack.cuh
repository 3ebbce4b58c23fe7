// Codes and pairs between shared memory, where a block works on them, and the stored orders of `src/layout/order.rs`.
//
// In shared memory a code is a byte, codes[token * code_stride + channel], and (code_stride / 4) % 32 == 4, so that the rows of
// 8 neighbouring tokens begin in banks 0, 4 .. 28. 16-bit elements lie likewise, with a stride of code_stride / 2 elements.
// Pairs lie in row order. Every function here is called by all threads of a block of whole warps, and synchronises nothing.
//
// Fragment order. A unit is what one warp moves at a time: whole blocks of 16 rows by 16 columns (16, 32, 64 rows for narrow
// codes) that fill whole 16-byte vectors, lane after lane: 512 contiguous bytes a vector. Lane 4g + t reads the codes of rows
// 8i + g at columns 2t, 2t+1, 2t+8, 2t+9. Of keys (rows are tokens) these are two 16-bit loads in bank 4g + t/2, of values
// (rows are channels) four byte loads in bank 8t + g/4: no two lanes meet in a bank with different words.
//
// Pairs are transposed between the orders: a lane reads words that lie side by side in shared memory, and neighbours exchange
// halves, so that both ends see whole 32-byte sectors and no bank twice.
#pragma once
#include "layout.cuh"
#include "rows.cuh"

namespace qkv {

// Words that a warp moves at a time a lane, words of one block of the matrix, and blocks that these words are.
template <int Bits>
struct FragmentUnit {
  static constexpr uint32_t kWords = Bits == 3 ? 12 : 4;
  static constexpr uint32_t kBlockWords = Bits == 16 ? 4 : Bits == 8 ? 2 : Bits == 3 ? 3 : 1;
  static constexpr uint32_t kBlocks = kWords / kBlockWords;
  // Groups of 8 rows in a block.
  static constexpr uint32_t kGroups = Bits >= 8 ? 2 : Bits == 3 ? 8 : 8 / Bits;
};

// The lane's four codes of one row, as the bytes of a word. `row` and `column` are the lane's own; `neighbours` puts columns 2t
// and 2t+1 side by side (FP8), otherwise 2t and 2t+8.
__device__ __forceinline__ uint32_t load_quad(bool value, bool neighbours, const uint8_t* codes, uint32_t stride, uint32_t row,
                                              uint32_t column) {
  uint32_t low, high;
  if (value) {
    const uint8_t* p = codes + column * stride + row;
    low = p[0] | (uint32_t)p[stride] << 8;
    high = p[8 * stride] | (uint32_t)p[9 * stride] << 8;
  } else {
    const uint8_t* p = codes + row * stride + column;
    low = *(const uint16_t*)p;
    high = *(const uint16_t*)(p + 8);
  }
  return __byte_perm(low, high, neighbours ? 0x5410 : 0x5140);
}

__device__ __forceinline__ void store_quad(bool value, bool neighbours, uint8_t* codes, uint32_t stride, uint32_t row,
                                           uint32_t column, uint32_t quad) {
  uint32_t low = __byte_perm(quad, 0, neighbours ? 0x4410 : 0x4420);
  uint32_t high = __byte_perm(quad, 0, neighbours ? 0x4432 : 0x4431);
  if (value) {
    uint8_t* p = codes + column * stride + row;
    p[0] = (uint8_t)low;
    p[stride] = (uint8_t)(low >> 8);
    p[8 * stride] = (uint8_t)high;
    p[9 * stride] = (uint8_t)(high >> 8);
  } else {
    uint8_t* p = codes + row * stride + column;
    *(uint16_t*)p = (uint16_t)low;
    *(uint16_t*)(p + 8) = (uint16_t)high;
  }
}

// Register i of a 16-bit block: row g + 8 (i mod 2), columns 2t + 8 (i / 2) and the next.
__device__ __forceinline__ uint32_t load_halves(bool value, const uint16_t* halves, uint32_t stride, uint32_t row,
                                                uint32_t column) {
  if (!value) return *(const uint32_t*)(halves + row * stride + column);
  const uint16_t* p = halves + column * stride + row;
  return p[0] | (uint32_t)p[stride] << 16;
}

__device__ __forceinline__ void store_halves(bool value, uint16_t* halves, uint32_t stride, uint32_t row, uint32_t column,
                                             uint32_t w) {
  if (!value) {
    *(uint32_t*)(halves + row * stride + column) = w;
    return;
  }
  uint16_t* p = halves + column * stride + row;
  p[0] = (uint16_t)w;
  p[stride] = (uint16_t)(w >> 16);
}

// Moves the codes of one block between its words and shared memory. `Load` is the direction shared -> words. Rows of values
// beyond the last channel are padding: 0 when loaded, left out when stored.
template <int Bits, bool Load>
__device__ __forceinline__ void move_block(const QkvFormat& f, const QkvOperand& at, uint8_t* codes, uint32_t stride, uint32_t m,
                                           uint32_t kb, uint32_t lane, uint32_t* w) {
  constexpr uint32_t kGroups = FragmentUnit<Bits>::kGroups;
  const bool value = at.value, neighbours = f.kind != QKV_KIND_AFFINE;
  const uint32_t g = lane / 4, column = 16 * kb + 2 * (lane % 4), rows = value ? at.dim : QKV_TILE;
  if constexpr (Bits == 16) {
    uint16_t* halves = (uint16_t*)codes;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      uint32_t row = 16 * m + 8 * (i % 2) + g, c = column + 8 * (i / 2);
      if constexpr (Load) {
        w[i] = load_halves(value, halves, stride, row, c);
      } else {
        store_halves(value, halves, stride, row, c, w[i]);
      }
    }
  } else {
    if constexpr (Load) {
#pragma unroll
      for (uint32_t i = 0; i < FragmentUnit<Bits>::kBlockWords; i++) w[i] = 0;
    }
#pragma unroll
    for (uint32_t i = 0; i < kGroups; i++) {
      uint32_t first = 8 * (kGroups * m + i);
      if (first >= rows) continue;
      uint32_t row = first + g;
      if constexpr (Load) {
        uint32_t q = load_quad(value, neighbours, codes, stride, row, column);
        if constexpr (Bits == 8) {
          w[i] = q;
        } else if constexpr (Bits != 3) {
          w[0] |= q << (Bits * i);
        } else if (i < 6) {
          w[i / 2] |= q << (3 * (i % 2));
        } else {
          // The last two rows use what the others leave free: their high bits above those, their low bits in the third word.
          w[i - 6] |= (q & 0x06060606) << 5;
          w[2] |= (q & 0x01010101) << i;
        }
      } else {
        constexpr uint32_t kMask = Bits == 8 ? 0xffffffff : ((1u << (Bits & 7)) - 1) * 0x01010101u;
        uint32_t q;
        if constexpr (Bits == 8) {
          q = w[i];
        } else if constexpr (Bits != 3) {
          q = w[0] >> (Bits * i) & kMask;
        } else if (i < 6) {
          q = w[i / 2] >> (3 * (i % 2)) & kMask;
        } else {
          q = (w[i - 6] >> 5 & 0x06060606) | (w[2] >> i & 0x01010101);
        }
        store_quad(value, neighbours, codes, stride, row, column, q);
      }
    }
  }
}

// One unit of the codes section at `section`, shared -> section where `Load`.
template <int Bits, bool Load>
__device__ __forceinline__ void move_unit(const QkvFormat& f, const QkvOperand& at, uint8_t* codes, uint32_t stride, uint32_t unit,
                                          uint8_t* section) {
  using U = FragmentUnit<Bits>;
  const uint32_t lane = threadIdx.x % 32, words = lane_words(at), vectors = words / 4;
  const uint32_t nb = (at.value ? QKV_TILE : at.dim) / 16, blocks = words / U::kBlockWords;
  uint32_t w[U::kWords];
  auto transfer = [&](auto vector, auto single) {
#pragma unroll
    for (uint32_t v = 0; v < U::kWords / 4; v++) {
      uint32_t first = unit * U::kWords + 4 * v;
      if (first + 4 <= words) {
        vector((uint4*)(section + first / 4 * 512) + lane, w + 4 * v);
      } else {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
          if (first + i < words) {
            single((uint32_t*)(section + vectors * 512 + (first + i - 4 * vectors) * 128) + lane, w[4 * v + i]);
          }
        }
      }
    }
  };
  if constexpr (!Load) {
    transfer(
        [](const uint4* p, uint32_t* w) {
          uint4 x = *p;
          w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
        },
        [](const uint32_t* p, uint32_t& w) { w = *p; });
  }
  uint32_t block = unit * U::kBlocks, m = block / nb, kb = block - m * nb;
#pragma unroll
  for (uint32_t i = 0; i < U::kBlocks; i++) {
    if (block + i < blocks) move_block<Bits, Load>(f, at, codes, stride, m, kb, lane, w + i * U::kBlockWords);
    if (++kb == nb) {
      kb = 0;
      m++;
    }
  }
  if constexpr (Load) {
    transfer([](uint4* p, const uint32_t* w) { *p = make_uint4(w[0], w[1], w[2], w[3]); },
             [](uint32_t* p, uint32_t w) { *p = w; });
  }
}

template <bool Load>
__device__ __forceinline__ void move_codes(const QkvFormat& f, const QkvOperand& at, uint8_t* codes, uint32_t stride,
                                           uint32_t unit, uint8_t* section) {
  switch (code_bits(f)) {
    case 1: return move_unit<1, Load>(f, at, codes, stride, unit, section);
    case 2: return move_unit<2, Load>(f, at, codes, stride, unit, section);
    case 3: return move_unit<3, Load>(f, at, codes, stride, unit, section);
    case 4: return move_unit<4, Load>(f, at, codes, stride, unit, section);
    default: return move_unit<8, Load>(f, at, codes, stride, unit, section);
  }
}

__device__ __forceinline__ uint32_t code_units(const QkvFormat& f, const QkvOperand& at) {
  uint32_t words = code_bits(f) == 3 ? 12 : 4;
  return (lane_words(at) + words - 1) / words;
}

__device__ __forceinline__ bool pairs_per_channel(const QkvFormat& f) { return f.kind == QKV_KIND_AFFINE && f.per_channel; }

// Units of the pairs section: per token 32 columns of 8 words, per channel 64 channels of a token group.
__device__ __forceinline__ uint32_t pair_units(const QkvFormat& f, const QkvOperand& at) {
  if (at.pair_count == 0) return 0;
  if (pairs_per_channel(f)) return at.pair_count / at.dim * ((at.dim + 63) / 64);
  return (at.pair_count / 8 + 31) / 32;
}

// One unit of the pairs section: shared (row order) -> section (fragment order) where `Load`.
template <bool Load>
__device__ __forceinline__ void move_pairs(const QkvFormat& f, const QkvOperand& at, uint32_t* pairs, uint32_t unit,
                                           uint8_t* section) {
  const uint32_t lane = threadIdx.x % 32;
  if (!pairs_per_channel(f)) {
    // Row order is [8 s + r][j], fragment order [r][j][s]: with q = r * groups + j, a matrix [s][q] and its transpose. A lane
    // holds the 8 words of one q, one half of it as a vector of its own and one of its neighbour's.
    const uint32_t columns = at.pair_count / 8, q = unit * 32 + lane;
    const bool odd = lane & 1, live = q < columns;
    uint32_t x[8];
    // 16-byte vectors: first of the even column of the two lanes, then of the odd one; the odd lane has their second halves.
    uint4* even = (uint4*)section + 2 * (q & ~1u) + odd;
    if constexpr (Load) {
#pragma unroll
      for (int s = 0; s < 8; s++) x[s] = live ? pairs[s * columns + q] : 0;
    } else {
      uint4 a = live ? even[0] : make_uint4(0, 0, 0, 0), b = live ? even[2] : make_uint4(0, 0, 0, 0);
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    }
#pragma unroll
    for (int s = 0; s < 4; s++) {
      uint32_t other = __shfl_xor_sync(0xffffffff, odd ? x[s] : x[s + 4], 1);
      x[s] = odd ? other : x[s];
      x[s + 4] = odd ? x[s + 4] : other;
    }
    if (!live) return;
    if constexpr (Load) {
      even[0] = make_uint4(x[0], x[1], x[2], x[3]);
      even[2] = make_uint4(x[4], x[5], x[6], x[7]);
    } else {
#pragma unroll
      for (int s = 0; s < 8; s++) pairs[s * columns + q] = x[s];
    }
    return;
  }
  const uint32_t chunks = (at.dim + 63) / 64, group = unit / chunks, eighth = at.dim / 8, base = unit % chunks * 8;
  uint32_t* row = pairs + group * at.dim;
  uint32_t* words = (uint32_t*)section + group * at.dim;
  if (at.value) {
    // Row order is channel 8 r + x, fragment order [x][r]: a lane holds r and r + 4, 32 neighbouring words a load.
    const uint32_t x = lane / 4, r = base + lane % 4;
    const bool odd = x & 1;
    // Of the even x of two lanes' x, then of the odd one.
    uint32_t at_r = r + (odd ? 4 : 0), even = (x & ~1u) * eighth + at_r, next = even + eighth;
    bool first = r < eighth, second = r + 4 < eighth, there = at_r < eighth;
    uint32_t a, b;
    if constexpr (Load) {
      a = first ? row[8 * r + x] : 0;
      b = second ? row[8 * (r + 4) + x] : 0;
    } else {
      a = there ? words[even] : 0;
      b = there ? words[next] : 0;
    }
    uint32_t other = __shfl_xor_sync(0xffffffff, odd ? a : b, 4);
    a = odd ? other : a;
    b = odd ? b : other;
    if constexpr (Load) {
      if (there) words[even] = a, words[next] = b;
    } else {
      if (first) row[8 * r + x] = a;
      if (second) row[8 * (r + 4) + x] = b;
    }
    return;
  }
  // Steps, then mins, two channels 8 r + 2 t a word: [t][r]. The lanes of a half warp have 32 neighbouring pairs.
  const uint32_t t = lane / 4 % 4, r = base + lane / 16 * 4 + lane % 4;
  if (r >= eighth) return;
  uint2* two = (uint2*)(row + 8 * r + 2 * t);
  uint32_t *steps = words + t * eighth + r, *mins = steps + at.dim / 2;
  if constexpr (Load) {
    uint2 p = *two;
    *steps = __byte_perm(p.x, p.y, 0x5410);
    *mins = __byte_perm(p.x, p.y, 0x7632);
  } else {
    uint32_t s = *steps, m = *mins;
    // As one number: the compiler takes a vector of these apart, and then the lanes meet.
    *(uint64_t*)two = __byte_perm(s, m, 0x5410) | (uint64_t)__byte_perm(s, m, 0x7632) << 32;
  }
}

// Sections of one operand in fragment order from shared memory (`Load`), or back. `codes` is 16-byte aligned, `pairs` 8-byte; the
// sections are in global memory, 16-byte aligned.
template <bool Load>
__device__ __forceinline__ void move_fragment(const QkvFormat& f, const QkvOperand& at, uint8_t* codes, uint32_t code_stride,
                                              uint32_t* pairs, uint8_t* code_section, uint8_t* pair_section) {
  const uint32_t units = code_units(f, at), all = units + pair_units(f, at);
  for (uint32_t u = threadIdx.x / 32; u < all; u += blockDim.x / 32) {
    if (u < units) {
      move_codes<Load>(f, at, codes, code_stride, u, code_section);
    } else {
      move_pairs<Load>(f, at, pairs, u - units, pair_section);
    }
  }
}

template <bool Load>
__device__ __forceinline__ void move_fragment_halves(const QkvFormat& f, const QkvOperand& at, uint16_t* halves, uint32_t stride,
                                                     uint8_t* section) {
  for (uint32_t u = threadIdx.x / 32; u < code_units(f, at); u += blockDim.x / 32) {
    move_unit<16, Load>(f, at, (uint8_t*)halves, stride, u, section);
  }
}

// Writes one operand of a page: codes and pairs from shared memory. Pairs are not read where the page has none.
__device__ inline void write_fragment(const QkvFormat& f, const QkvOperand& at, const uint8_t* codes, uint32_t code_stride,
                                      const uint32_t* pairs, uint8_t* page) {
  move_fragment<true>(f, at, (uint8_t*)codes, code_stride, (uint32_t*)pairs, page + at.codes, page + at.pairs);
}

// The same for F16 and BF16; `stride` is in elements.
__device__ inline void write_fragment_halves(const QkvFormat& f, const QkvOperand& at, const uint16_t* halves, uint32_t stride,
                                             uint8_t* page) {
  move_fragment_halves<true>(f, at, (uint16_t*)halves, stride, page + at.codes);
}

// The inverse of both. Padding is not looked at.
__device__ inline void read_fragment(const QkvFormat& f, const QkvOperand& at, const uint8_t* page, uint8_t* codes,
                                     uint32_t code_stride, uint32_t* pairs) {
  move_fragment<false>(f, at, codes, code_stride, pairs, (uint8_t*)page + at.codes, (uint8_t*)page + at.pairs);
}

__device__ inline void read_fragment_halves(const QkvFormat& f, const QkvOperand& at, const uint8_t* page, uint16_t* halves,
                                            uint32_t stride) {
  move_fragment_halves<false>(f, at, halves, stride, (uint8_t*)page + at.codes);
}

}  // namespace qkv
