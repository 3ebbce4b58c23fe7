// A lane's codes of a tile in fragment order (`src/layout/order.rs`), in registers, and the A operands made of them: one mask
// for two codes, or one conversion. Rows are tokens of K or channels of the transposed V, in tiles of 16; columns are the other.
#pragma once
#include "../ptx.cuh"
#include "format.cuh"

namespace qkv {

#if __CUDA_ARCH__ < 890
// E4M3 bytes in the high halves of 16 bits, as f16 too small by 2^8; NaN stays NaN.
__device__ __forceinline__ uint32_t shifted_e4m3(uint32_t x) {
  uint32_t magnitude = x >> 1 & 0x3f803f80;
  // Of all magnitudes only that of NaN carries into bit 14, which makes the exponent all ones.
  return magnitude | (magnitude + 0x00800080 & 0x40004000) | (x & 0x80008000);
}
#endif

#if __CUDA_ARCH__ < 890
// Two neighbouring E4M3 bytes of a word as f16 too large by 144: 448 becomes a number below f16's largest, and NaN, whose bits would
// be 480, infinity, which the sums turn back to NaN. So nothing has to look for NaN.
template <int First>
__device__ __forceinline__ uint32_t large_e4m3(uint32_t word) {
  // Sign extended, shifted by 7: exponent and mantissa lie where f16 has them, the sign in bit 15, and some bits to clear.
  const uint32_t wide = permute<First == 0 ? 0x9180 : 0xb3a2>(word);
  // Too small by 2^8; the product is exact, since both have four significant bits.
  return mul_half2(wide << 7 & 0xbf80bf80, 0x78807880);
}
#endif

// Two E4M3 bytes as f16.
__device__ __forceinline__ uint32_t e4m3_to_half2(uint16_t bytes) {
#if __CUDA_ARCH__ >= 890
  return cvt_f16x2_e4m3x2(bytes);
#else
  return mul_half2(shifted_e4m3(__byte_perm(bytes, 0, 0x1404)), 0x5c005c00);
#endif
}

// Tiles of 16 rows that are loaded together: the fewest whose words end on a vector boundary, or all.
template <class F, int Columns>
__host__ __device__ constexpr int slice_tiles(int all) {
  for (int n = F::kTiles; n < all; n *= 2) {
    if (n / F::kTiles * F::kWords * (Columns / 16) % 4 == 0) return n;
  }
  return (all + F::kTiles - 1) / F::kTiles * F::kTiles;
}

// Words of the lane for `Tiles` tiles of 16 rows by `Columns`.
template <class F, int Tiles, int Columns>
struct Slice {
  static constexpr int kCount = Tiles / F::kTiles * F::kWords * (Columns / 16);
  static constexpr int kVectors = kCount / 4;
  static_assert(kCount % 4 == 0, "heads of 64 or 128 channels have whole vectors");
  uint4 v[kVectors];

  // Slice `index` of the section. `codes`: the lane's first vector.
  __device__ __forceinline__ void load(const uint8_t* codes, int index) {
#pragma unroll
    for (int i = 0; i < kVectors; i++) v[i] = load_stream16(codes + (index * kVectors + i) * 512);
  }

  __device__ __forceinline__ uint32_t& word(int w) {
    uint4& x = v[w / 4];
    return w % 4 == 0 ? x.x : w % 4 == 1 ? x.y : w % 4 == 2 ? x.z : x.w;
  }

  // Codes of tile mt (of the slice) and columns 16 kb .. + 15 as f16 (bf16 pages: bf16).
  __device__ __forceinline__ void fragment(int mt, int kb, uint32_t (&a)[4]) {
    constexpr int kBlocks = Columns / 16;
    int at = F::kWords * (mt / F::kTiles * kBlocks + kb);
    if constexpr (F::kBits == 16) {
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = word(at + i);
    } else if constexpr (F::kFp8) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint32_t w = word(at + h);
        if constexpr (F::kKind == QKV_KIND_E5M2) {
          a[h] = __byte_perm(w, 0, 0x1404);
          a[2 + h] = __byte_perm(w, 0, 0x3424);
        } else {
#if __CUDA_ARCH__ >= 890
          cvt_f16x4_e4m3x4(w, a[h], a[2 + h]);
#else
          a[h] = large_e4m3<0>(w);
          a[2 + h] = large_e4m3<2>(w);
#endif
        }
      }
    } else if constexpr (F::kBits == 8) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint32_t w = word(at + h);
        a[h] = w & 0x00ff00ff;
        a[2 + h] = __byte_perm(w, 0, 0x4341);
      }
    } else if constexpr (F::kBits == 3) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int f = 2 * (mt % 4) + h;
        if (f < 6) {
          uint32_t w = word(at + f / 2), mask = 0x00070007u << (3 * (f % 2));
          a[h] = w & mask;
          a[2 + h] = w >> 8 & mask;
        } else {
          // The high bits lie at 6 and 7, the low one in another word.
          uint32_t high = word(at + f - 6), low = word(at + 2) >> (f - 5);
          a[h] = (high & 0x00c000c0) | (low & 0x00200020);
          a[2 + h] = (high >> 8 & 0x00c000c0) | (low >> 8 & 0x00200020);
        }
      }
    } else {
      uint32_t w = word(at), next = w >> 8;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint32_t mask = 0x00010001u * ((1u << F::kBits) - 1) << F::position(mt, h);
        a[h] = w & mask;
        a[2 + h] = next & mask;
      }
    }
  }

  // Clears the columns at or beyond `valid`: 8-bit floats and 16-bit ones hold anything there, and 0 times NaN is NaN. Lane t of
  // four holds columns 2t, 2t + 1, 2t + 8, 2t + 9 of 16.
  __device__ __forceinline__ void clear_columns(int valid, uint32_t t) {
    constexpr int kBlocks = Columns / 16;
    static_assert(F::kBits == 8 || F::kBits == 16, "codes below 8 bits are numbers whatever they hold");
#pragma unroll
    for (int w = 0; w < kCount; w++) {
      int column = w / F::kWords % kBlocks * 16 + 2 * t + (F::kBits == 16 ? w % 4 / 2 * 8 : 0);
      uint32_t keep;
      if (F::kBits == 16) {
        keep = (column < valid ? 0xffff : 0) | (column + 1 < valid ? 0xffff0000 : 0);
      } else {
        keep = (column < valid ? 0xff : 0) | (column + 1 < valid ? 0xff00 : 0) | (column + 8 < valid ? 0xff0000 : 0) |
               (column + 9 < valid ? 0xff000000 : 0);
      }
      word(w) &= keep;
    }
  }
};

}  // namespace qkv
