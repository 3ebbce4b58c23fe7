// Tiles of closed pages, decoded into shared memory (see prefill_stage.cuh). A warp reads words in fragment order, 512 neighbouring
// bytes at a time, and stores two elements at once; no two lanes meet in a bank.
#pragma once
#include "prefill_stage.cuh"

namespace qkv {

// Calls f(block m, kb, the lane's words of it) for every block of the code section, a vector of each lane at a time. For FP8 and
// halves.
template <int BlockWords, bool Value, typename F>
__device__ __forceinline__ void each_block(const QkvOperand& at, const uint8_t* section, F f) {
  const uint32_t vectors = at.code_bytes / 512, nb = Value ? QKV_TILE / 16 : at.dim / 16;
  // Division by nb <= 32 of numbers below 2048: exact.
  const uint32_t inverse = 65536 / nb + 1;
#pragma unroll 1
  for (uint32_t v = threadIdx.x / 32; v < vectors; v += blockDim.x / 32) {
    const uint4 x = __ldg((const uint4*)(section + v * 512) + threadIdx.x % 32);
    const uint32_t w[4] = {x.x, x.y, x.z, x.w};
    uint32_t block = v * (4 / BlockWords), m = Value ? block / nb : block * inverse >> 16, kb = block - m * nb;
#pragma unroll
    for (uint32_t i = 0; i < 4 / BlockWords; i++) {
      f(m, kb, w + i * BlockWords);
      if (++kb == nb) {
        kb = 0;
        m++;
      }
    }
  }
}

// Steps and mins of a block of 16 rows by 16 columns: of columns 2t, 2t+1 and of 2t+8, 2t+9.
struct Pairs {
  uint32_t step[2], min[2];
};

__device__ __forceinline__ void one_pair(Pairs& p, uint32_t word) {
  p.step[0] = p.step[1] = __byte_perm(word, 0, 0x1010);
  p.min[0] = p.min[1] = __byte_perm(word, 0, 0x3232);
}

// Pairs that all rows of the block share, for formats that have them along columns.
template <bool Value>
__device__ __forceinline__ void column_pairs(Pairs& p, uint32_t group_shift, const QkvOperand& at, const uint8_t* section,
                                             uint32_t row, uint32_t kb, uint32_t t) {
  if (Value) {
    const uint32_t groups = at.pair_count / QKV_TILE, j = row >> group_shift;
    const uint8_t* first = section + ((2 * t * groups + j) * 8 + 2 * kb) * 4;
    const uint2 a = __ldg((const uint2*)first), b = __ldg((const uint2*)(first + groups * 32));
    p.step[0] = __byte_perm(a.x, b.x, 0x5410), p.min[0] = __byte_perm(a.x, b.x, 0x7632);
    p.step[1] = __byte_perm(a.y, b.y, 0x5410), p.min[1] = __byte_perm(a.y, b.y, 0x7632);
  } else {
    const uint8_t* first = section + (row >> group_shift) * 4 * at.dim + t * (at.dim / 2) + kb * 8;
    const uint2 step = __ldg((const uint2*)first), min = __ldg((const uint2*)(first + 2 * at.dim));
    p.step[0] = step.x, p.step[1] = step.y, p.min[0] = min.x, p.min[1] = min.y;
  }
}

// The pair of one row, for formats that have them along rows.
template <bool Value>
__device__ __forceinline__ void row_pair(Pairs& p, uint32_t group_shift, const QkvOperand& at, const uint8_t* section, uint32_t row,
                                         uint32_t kb) {
  uint32_t index;
  if (Value) {
    index = (16 * kb >> group_shift) * at.dim + (row & 7) * (at.dim / 8) + (row >> 3);
  } else {
    index = ((row & 7) * (at.pair_count / QKV_TILE) + (16 * kb >> group_shift)) * 8 + (row >> 3);
  }
  one_pair(p, __ldg((const uint32_t*)section + index));
}

// Stores four codes of a row, the bytes of a word in columns 2t, 2t+8, 2t+1, 2t+9, decoded.
template <bool Value>
__device__ __forceinline__ void store_codes(const Staged& s, const Pairs& p, uint32_t row, uint32_t column, uint32_t quad) {
  // 1024 + code is an f16 of these bits; taking 1024 away is exact.
  uint32_t low = __byte_perm(quad, 0x64646464, 0x4240), high = __byte_perm(quad, 0x64646464, 0x4341);
  low = fma_f16x2(sub_f16x2(low, 0x64006400), p.step[0], p.min[0]);
  high = fma_f16x2(sub_f16x2(high, 0x64006400), p.step[1], p.min[1]);
  *(uint32_t*)element<Value>(s, row, column) = low;
  *(uint32_t*)element<Value>(s, row, column + 8) = high;
}

// Steps and mins of a vector's blocks, which neighbour each other in a row of blocks: [block][columns 2t, 2t + 1 and 8 more], or
// where pairs lie along rows, [block][rows g and g + 8].
template <int Blocks, bool Value, bool Columns>
struct VectorPairs {
  uint32_t step[Blocks][2], min[Blocks][2];

  // Blocks kb .. of row m of blocks.
  __device__ __forceinline__ VectorPairs(const Staged& s, const uint8_t* section, uint32_t m, uint32_t kb, uint32_t g, uint32_t t) {
    if constexpr (Columns && Value) {
      const uint32_t groups = s.at.pair_count / QKV_TILE, j = 16 * m >> s.group_shift;
      const uint8_t* first = section + ((2 * t * groups + j) * 8 + 2 * kb) * 4;
#pragma unroll
      for (int i = 0; i < Blocks; i += 2) {
        const uint4 a = __ldg((const uint4*)(first + 8 * i)), b = __ldg((const uint4*)(first + groups * 32 + 8 * i));
        const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int h = 0; h < 4; h++) {
          step[i + h / 2][h % 2] = __byte_perm(x[h], y[h], 0x5410), min[i + h / 2][h % 2] = __byte_perm(x[h], y[h], 0x7632);
        }
      }
    } else if constexpr (Columns) {
      const uint8_t* first = section + (16 * m >> s.group_shift) * 4 * s.at.dim + t * (s.at.dim / 2) + kb * 8;
#pragma unroll
      for (int i = 0; i < Blocks; i += 2) {
        const uint4 a = __ldg((const uint4*)(first + 8 * i)), b = __ldg((const uint4*)(first + 2 * s.at.dim + 8 * i));
        step[i][0] = a.x, step[i][1] = a.y, step[i + 1][0] = a.z, step[i + 1][1] = a.w;
        min[i][0] = b.x, min[i][1] = b.y, min[i + 1][0] = b.z, min[i + 1][1] = b.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Blocks; i++) {
        const uint32_t j = 16 * (kb + i) >> s.group_shift;
        const uint32_t row = Value ? j * s.at.dim + g * (s.at.dim / 8) : (g * (s.at.pair_count / QKV_TILE) + j) * 8;
        const uint2 w = __ldg((const uint2*)(section + 4 * (row + 2 * m)));
        step[i][0] = __byte_perm(w.x, 0, 0x1010), min[i][0] = __byte_perm(w.x, 0, 0x3232);
        step[i][1] = __byte_perm(w.y, 0, 0x1010), min[i][1] = __byte_perm(w.y, 0, 0x3232);
      }
    }
  }
};

// Codes of 4 and 8 bits of which a vector's blocks have the same 16 rows: values, and keys of a multiple of 64 (32) channels.
template <int Bits, bool Value, bool Columns>
__device__ __forceinline__ void stage_wide_codes(const Staged& s, const uint8_t* page) {
  constexpr int kBlocks = 16 / Bits;
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t vectors = s.at.code_bytes / 512, across = (Value ? QKV_TILE : s.at.dim) / 16 / kBlocks;
#pragma unroll 1
  for (uint32_t v = threadIdx.x / 32; v < vectors; v += blockDim.x / 32) {
    // Keys have four rows of blocks: so no division.
    const uint32_t m = Value ? v / across : v % 4, along = Value ? v % across : v / 4;
    const uint4 x = __ldg((const uint4*)(page + s.at.codes + (m * across + along) * 512) + lane);
    const uint32_t w[4] = {x.x, x.y, x.z, x.w}, kb = along * kBlocks;
    const VectorPairs<kBlocks, Value, Columns> pairs(s, page + s.at.pairs, m, kb, g, t);
    // Values: the vectors of a row are exchanged by its number mod 8, which is g (`element`).
    const uint32_t first = Value ? s.address + (16 * m + g) * kChannelBytes + (2 * kb << 4 ^ g << 4) + 4 * t
                                 : s.address + (16 * m + g) * s.row_bytes + 32 * kb + 4 * t;
    const uint32_t below = Value ? 8 * kChannelBytes : 8 * s.row_bytes;
#pragma unroll
    for (int i = 0; i < kBlocks; i++) {
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const uint32_t at = Value ? first ^ (2 * i + c) << 4 : first + 32 * i + 16 * c;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          // 1024 + code (4 bits of rows g + 8: 1024 + 16 code) is an f16 of these bits; taking 1024 away is exact.
          const uint32_t word = Bits == 8 ? w[2 * i + h] : w[i], codes = c ? word >> 8 : word;
          constexpr uint32_t kLow = Bits == 8 ? 0x00ff00ff : 0x000f000f, kHigh = Bits == 8 ? 0x00ff00ff : 0x00f000f0;
          const uint32_t biased = h ? masked_or<kHigh>(codes, 0x64006400) : masked_or<kLow>(codes, 0x64006400);
          const uint32_t code = Bits == 4 && h ? fma_f16x2(biased, 0x2c002c00, 0xd400d400) : sub_f16x2(biased, 0x64006400);
          const int p = Columns ? c : h;
          store_shared(at + h * below, fma_f16x2(code, pairs.step[i][p], pairs.min[i][p]));
        }
      }
    }
  }
}

// Codes of any bits: a block has 8, 4, 8, 2 or 2 groups of rows. A loop over all of them keeps the code small.
template <bool Value>
__device__ __forceinline__ void stage_any_codes(const Staged& s, const uint8_t* page, bool columns) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, rows = Value ? s.at.dim : QKV_TILE, bits = s.f.bits;
  const uint32_t nb = (Value ? QKV_TILE : s.at.dim) / 16, groups = bits == 2 ? 4 : bits < 4 ? 8 : 2;
  const uint32_t block_words = bits == 3 ? 3 : bits == 8 ? 2 : 1;
  const uint32_t words = lane_words(s.at), blocks = words / block_words;
  const uint8_t *section = page + s.at.pairs, *codes = page + s.at.codes;
#pragma unroll 1
  for (uint32_t block = threadIdx.x / 32; block < blocks; block += blockDim.x / 32) {
    const uint32_t m = block / nb, kb = block - m * nb;
    auto word = [&](uint32_t i) { return __ldg((const uint32_t*)(codes + word_byte(words, lane, block * block_words + i))); };
    uint32_t w[3] = {word(0), 0, 0};
    if (block_words > 1) w[1] = word(1);
    if (block_words > 2) w[2] = word(2);
    Pairs p;
#pragma unroll 1
    for (uint32_t i = 0; i < groups; i++) {
      const uint32_t first = 8 * (groups * m + i), row = first + g;
      // Rows of values are padded.
      if (first >= rows) break;
      if (!columns) {
        row_pair<Value>(p, s.group_shift, s.at, section, row, kb);
      } else if (i % 2 == 0) {
        column_pairs<Value>(p, s.group_shift, s.at, section, first, kb, t);
      }
      uint32_t quad;
      if (bits == 8) {
        quad = i ? w[1] : w[0];
      } else if (bits != 3) {
        quad = w[0] >> (bits * i) & 0x01010101 * ((1 << bits) - 1);
      } else if (i < 6) {
        quad = (i < 2 ? w[0] : i < 4 ? w[1] : w[2]) >> (3 * (i % 2)) & 0x07070707;
      } else {
        quad = ((i == 6 ? w[0] : w[1]) >> 5 & 0x06060606) | (w[2] >> i & 0x01010101);
      }
      store_codes<Value>(s, p, row, 16 * kb + 2 * t, quad);
    }
  }
}

// Whether a group's largest value is beyond f16 (or no number).
template <bool Value>
__device__ __forceinline__ bool pairs_overflow(const Staged& s, const uint8_t* page) {
  const uint32_t* words = (const uint32_t*)(page + s.at.pairs);
  // 2^bits - 1 twice.
  const uint32_t most = float_to_half((float)((1u << s.f.bits) - 1)) * 0x00010001u;
  uint32_t bad = 0;
  for (uint32_t i = threadIdx.x; i < s.at.pair_count; i += blockDim.x) {
    uint32_t step, min;
    if (!Value && s.f.per_channel) {
      // Two steps a word, as many words of mins behind them: each pair is looked at by two threads, which does no harm.
      const uint32_t half = s.at.dim / 2, at = i / s.at.dim * s.at.dim + i % half;
      step = __ldg(words + at), min = __ldg(words + at + half);
    } else {
      step = __ldg(words + i);
      min = __byte_perm(step, 0, 0x3232), step = __byte_perm(step, 0, 0x1010);
    }
    bad |= not_finite(fma_f16x2(step, most, min));
  }
  return bad != 0;
}

// Every element by its place: slow, for pairs that f16 arithmetic cannot apply.
template <bool Value>
__device__ void stage_affine_wide(Staged& s, const uint8_t* page) {
  s.factor = 512.0f;
  for (uint32_t i = threadIdx.x; i < QKV_TILE * s.at.dim; i += blockDim.x) {
    const uint32_t token = i / s.at.dim, channel = i % s.at.dim;
    uint32_t code = 0, low = 0, high = 0;
    for (uint32_t b = 0; b < s.f.bits; b++) {
      Place place = code_bit(s.f, s.at, QKV_ORDER_FRAGMENT, token, channel, b);
      code |= (uint32_t)(page[s.at.codes + place.byte] >> place.bit & 1) << b;
    }
    pair_bytes(s.f, s.at, QKV_ORDER_FRAGMENT, token, channel, low, high);
    const uint8_t* pairs = page + s.at.pairs;
    const float step = half_to_float(*(const uint16_t*)(pairs + low)), min = half_to_float(*(const uint16_t*)(pairs + high));
    const float x = add(mul(step, (float)code), min);
    *(uint16_t*)element<Value>(s, Value ? channel : token, Value ? token : channel) = float_to_half(mul(x, 1.0f / 512));
  }
}

// Two FP8 bytes in bits 0..7 and 16..23 as f16: of E5M2 the value, of E4M3 2^-8 of it.
__device__ __forceinline__ uint32_t fp8_halves(bool e5m2, uint32_t x) {
  if (e5m2) return x << 8;
  const uint32_t m = x & 0x007f007f, nan = (m + 0x00010001) & 0x00800080;
  return (m << 7) | (x & 0x00800080) << 8 | nan * 0xfc;
}

template <bool Value>
__device__ __forceinline__ void stage_fp8(Staged& s, const uint8_t* page) {
  const bool e5m2 = s.f.kind == QKV_KIND_E5M2, tokens = s.f.granularity == QKV_SCALE_TOKEN_HEAD;
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, rows = Value ? s.at.dim : QKV_TILE;
  const float raw = e5m2 ? 1.0f : 256.0f;
  const float* scales = (const float*)(page + s.at.pairs);
  s.factor = raw * s.scale;
  if (tokens) {
    float most = 0.0f;
    for (uint32_t i = threadIdx.x; i < QKV_TILE; i += blockDim.x) most = fmaxf(most, fabsf(__ldg(scales + i)));
    most = block_max(s, most < kInfinity ? most : 0.0f);
    choose_unit(s, fminf(most * (e5m2 ? 65536.0f : 2.0f), 1e38f));
    s.factor = raw * power_of_two(s.unit);
  }
  const float down = power_of_two(-s.unit);
  each_block<2, Value>(s.at, page + s.at.codes, [&](uint32_t m, uint32_t kb, const uint32_t* w) {
    // Of this lane's tokens: 2t, 2t+1, 2t+8, 2t+9 of the columns, or one a row.
    float scale[4];
    if (tokens && Value) {
      const float2 a = __ldg((const float2*)(scales + 2 * t * 8 + 2 * kb)), b = __ldg((const float2*)(scales + (2 * t + 1) * 8 + 2 * kb));
      scale[0] = a.x, scale[1] = b.x, scale[2] = a.y, scale[3] = b.y;
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
      const uint32_t first = 16 * m + 8 * half, row = first + g;
      if (Value && first >= rows) break;
      uint32_t low = fp8_halves(e5m2, __byte_perm(w[half], 0, 0x4140)), high = fp8_halves(e5m2, __byte_perm(w[half], 0, 0x4342));
      if (tokens) {
        if (!Value) scale[0] = scale[1] = scale[2] = scale[3] = __ldg(scales + (row & 7) * 8 + (row >> 3));
        const float x[4] = {half_to_float((uint16_t)low), half_to_float((uint16_t)(low >> 16)), half_to_float((uint16_t)high),
                            half_to_float((uint16_t)(high >> 16))};
        low = pack_half2(x[0] * (scale[0] * down), x[1] * (scale[1] * down));
        high = pack_half2(x[2] * (scale[2] * down), x[3] * (scale[3] * down));
      }
      *(uint32_t*)element<Value>(s, row, 16 * kb + 2 * t) = low;
      *(uint32_t*)element<Value>(s, row, 16 * kb + 2 * t + 8) = high;
    }
  });
}

template <bool Value>
__device__ __forceinline__ void stage_halves(Staged& s, const uint8_t* page) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, rows = Value ? s.at.dim : QKV_TILE;
  const bool bf16 = s.f.kind == QKV_KIND_BF16;
  float down = 1.0f;
  s.factor = 1.0f;
  if (bf16) {
    float most = 0.0f;
    for (uint32_t i = threadIdx.x; i < s.at.code_bytes / 4; i += blockDim.x) {
      float2 x = bfloats(__ldg((const uint32_t*)(page + s.at.codes) + i));
      most = larger(larger(most, x.x), x.y);
    }
    choose_unit(s, block_max(s, most));
    down = power_of_two(-s.unit);
    s.factor = power_of_two(s.unit);
  }
  each_block<4, Value>(s.at, page + s.at.codes, [&](uint32_t m, uint32_t kb, const uint32_t* w) {
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
      const uint32_t first = 16 * m + 8 * (i % 2), row = first + g;
      if (Value && first >= rows) continue;
      uint32_t x = w[i];
      if (bf16) {
        float2 y = bfloats(x);
        x = pack_half2(y.x * down, y.y * down);
      }
      *(uint32_t*)element<Value>(s, row, 16 * kb + 2 * t + 8 * (i / 2)) = x;
    }
  });
}

// Stages a page. Returns whether this thread found pairs that need `stage_affine_wide`, for which a barrier comes first.
template <bool Value>
__device__ __forceinline__ bool stage_page(Staged& s, const uint8_t* page) {
  if (is_half(s.f.kind)) {
    stage_halves<Value>(s, page);
    return false;
  }
  if (s.f.kind != QKV_KIND_AFFINE) {
    stage_fp8<Value>(s, page);
    return false;
  }
  s.factor = 1.0f;
  // Pairs lie along columns: of values per token, of keys per channel.
  const bool columns = Value != (s.f.per_channel != 0);
  if (s.f.bits == 4 && (Value || s.at.dim % 64 == 0)) {
    columns ? stage_wide_codes<4, Value, true>(s, page) : stage_wide_codes<4, Value, false>(s, page);
  } else if (s.f.bits == 8 && (Value || s.at.dim % 32 == 0)) {
    columns ? stage_wide_codes<8, Value, true>(s, page) : stage_wide_codes<8, Value, false>(s, page);
  } else {
    stage_any_codes<Value>(s, page, columns);
  }
  return pairs_overflow<Value>(s, page);
}

}  // namespace qkv
