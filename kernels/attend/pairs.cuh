// Pairs and scales of a page's tokens, and of its channels.
#pragma once
#include "codes.cuh"

namespace qkv {

// Lane 4n + t's part of an 8 x 8 operand B that takes the step of a pair to every column.
__device__ __forceinline__ uint32_t step_operand(uint32_t lane) { return lane % 4 == 0 ? 0x3c00 : 0; }

// One that takes the min to even columns and the step to odd ones.
__device__ __forceinline__ uint32_t min_step_operand(uint32_t lane) {
  return lane % 4 != 0 ? 0 : lane / 4 % 2 == 0 ? 0x3c000000 : 0x3c00;
}

// (step, min) pairs, or scales, of the lane's eight tokens: g, g + 8, ..
struct TokenPairs {
  uint32_t bits[8];

  // `from`: those of the lane's row.
  __device__ __forceinline__ void load(const uint8_t* from) {
    uint4 a = load_cached16(from), b = load_cached16(from + 16);
    bits[0] = a.x, bits[1] = a.y, bits[2] = a.z, bits[3] = a.w;
    bits[4] = b.x, bits[5] = b.y, bits[6] = b.z, bits[7] = b.w;
  }

  // Tokens at or beyond `tail` do not exist: what lies there may be anything.
  __device__ __forceinline__ void clear(uint32_t g, int tail) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (8 * i + (int)g >= tail) bits[i] = 0;
    }
  }

  // Largest step, in the low half.
  __device__ __forceinline__ uint32_t most_half() const {
    uint32_t most = bits[0];
#pragma unroll
    for (int i = 1; i < 8; i++) most = max_half2(most, bits[i]);
    return most;
  }

  __device__ __forceinline__ float most_float() const {
    float most = from_bits(bits[0]);
#pragma unroll
    for (int i = 1; i < 8; i++) most = fmaxf(most, from_bits(bits[i]));
    return most;
  }

  // Steps and mins of tokens 16 kb + g and 16 kb + g + 8. `operand`: of `min_step_operand`.
  __device__ __forceinline__ void values(int kb, uint32_t operand, float (&step)[2], float (&min)[2]) const {
    float q[4] = {};
    mma_f16_k8(q, bits[2 * kb], bits[2 * kb + 1], operand);
    step[0] = q[1], step[1] = q[3];
    min[0] = q[0], min[1] = q[2];
  }
};

// Steps (or mins) of a per-channel group of keys, of the lane whose part begins at `from`: of 16 channels each two words.
template <int D>
__device__ __forceinline__ void load_channels(const uint8_t* from, uint32_t (&x)[D / 8]) {
  static_assert(D % 32 == 0);
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    uint4 v = load_cached16(from + 16 * i);
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
  }
}

}  // namespace qkv
