// Formats at compile time, and what one needs to know of each to read its codes.
#pragma once
#include "../abi.h"
#include "../softmax.cuh"

namespace qkv {

// `Group`: elements of a group; a whole head of another size counts as the next multiple of 32.
template <int Kind, int Bits, bool Channel, int Group>
struct Coding {
  static constexpr int kKind = Kind, kBits = Bits, kGroup = Group;
  static constexpr bool kAffine = Kind == QKV_KIND_AFFINE, kChannel = kAffine && Channel;
  static constexpr bool kFp8 = Kind == QKV_KIND_E4M3 || Kind == QKV_KIND_E5M2;
  static constexpr bool kBfloat = Kind == QKV_KIND_BF16;
  // Whether pages have pairs or scales of it.
  static constexpr bool kPairs = kAffine || kFp8;
  // Tiles of 16 rows that share a word, and words of them per 16 columns.
  static constexpr int kTiles = Bits == 2 ? 2 : Bits == 1 || Bits == 3 ? 4 : 1;
  static constexpr int kWords = Bits == 16 ? 4 : Bits == 8 ? 2 : Bits == 3 ? 3 : 1;

  // What one of the f16 numbers is that enter the tensor cores: codes are subnormal ones.
#if __CUDA_ARCH__ >= 890
  static constexpr bool kLargeE4m3 = false;
#else
  static constexpr bool kLargeE4m3 = Kind == QKV_KIND_E4M3;
#endif
  static constexpr float kUnit = kAffine ? 16777216.0f : kLargeE4m3 ? 1.0f / 144 : 1.0f;

  // And they are too large by 2^position, in rows 8h .. 8h + 7 of tile mt: where the field lies in its byte.
  __host__ __device__ static constexpr int position(int mt, int h) {
    int f = 2 * (mt % kTiles) + h;
    if (Bits == 3) return f < 6 ? 3 * (f % 2) : 5;
    return kAffine && Bits < 8 ? Bits * f : 0;
  }

  // A sum of such numbers, in rows of tile mt, times this is what it is.
  static __device__ __forceinline__ float unit(int mt, int h) { return kAffine ? power_of_two(24 - position(mt, h)) : kUnit; }
  // The infinity that stands for NaN becomes NaN.
  static __device__ __forceinline__ float number(float sum) { return kLargeE4m3 ? fmaf(sum, 0.0f, sum) : sum; }
};

// How a token's channels are grouped.
template <class F, int D>
struct Groups {
  // Blocks of 32 channels that are summed before a pair is applied, and pairs of a token.
  static constexpr int kRun = F::kGroup < 32 ? 1 : F::kGroup / 32;
  static constexpr int kCount = F::kGroup < 32 ? 1 : ((D + 31) / 32 + kRun - 1) / kRun;
};

// Bytes of the codes of `Rows` by `Columns` elements in fragment order.
template <class F, int Rows, int Columns>
constexpr int kCodeBytes = (Rows / 16 + F::kTiles - 1) / F::kTiles * F::kWords * (Columns / 16) * 128;

}  // namespace qkv
