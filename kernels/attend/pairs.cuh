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

// The middle of the codes of a format of `bits`, and the same as f16.
__host__ __device__ constexpr float middle_code(int bits) { return 0.5f * ((1 << bits) - 1); }
__host__ __device__ constexpr uint32_t middle_code_half(int bits) {
  return (uint32_t)((13 + bits) << 10 | ((1 << (bits - 1)) - 1) << (11 - bits));
}

// One that takes what the middle code decodes as to even columns, and the step to odd ones.
__device__ __forceinline__ uint32_t middle_step_operand(uint32_t lane, int bits) {
  return lane % 4 != 0 ? 0 : lane / 4 % 2 == 0 ? 0x3c000000 | middle_code_half(bits) : 0x3c00;
}

// Operands in shared memory: where registers are short, reading one costs less than making it.
struct Operands {
  alignas(16) uint32_t one[4];
  uint32_t middle_step[32];

  // By one warp. `bits`: of the values.
  __device__ __forceinline__ void set(uint32_t lane, int bits) {
    if (lane < 4) one[lane] = 0x3c003c00;
    middle_step[lane] = middle_step_operand(lane, bits);
  }

  // An operand A of which all are one.
  __device__ __forceinline__ void ones(uint32_t (&a)[4]) const { load_shared16(a, shared_address(one)); }

  // The lane's `middle_step_operand`.
  __device__ __forceinline__ uint32_t middle(uint32_t lane) const { return load_shared(shared_address(middle_step + lane)); }
};

// Which tokens of a page exist.
struct Tail {
  // All, and none of them has to be masked.
  bool whole;
  // Tokens of the sequence, in shared memory; the page's number.
  const int32_t& length;
  int32_t tile;

  // Tokens at or beyond this do not. Looked up where it is used: the page loop has no register for it.
  __device__ __forceinline__ int tokens() const {
    return min((int)load_shared(shared_address(&length)) - tile * QKV_TILE, QKV_TILE);
  }
};

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

  // Steps, and mins or middles, of tokens 16 kb + g and 16 kb + g + 8. `operand`: of `min_step_operand` or `middle_step_operand`.
  __device__ __forceinline__ void values(int kb, uint32_t operand, float (&step)[2], float (&base)[2]) const {
    float q[4] = {};
    mma_f16_k8(q, bits[2 * kb], bits[2 * kb + 1], operand);
    step[0] = q[1], step[1] = q[3];
    base[0] = q[0], base[1] = q[2];
  }
};

// What a lane looks at for the largest step of a page: the four lanes of a row share its pairs, `Count` of each token.
template <int Count>
struct PairShare {
  uint32_t bits[2 * Count];

  // `row`: the lane's row.
  __device__ __forceinline__ void load(const uint8_t* row, uint32_t t) {
    const uint8_t* from = row + t * (8 * Count);
    if constexpr (Count % 2 == 0) {
#pragma unroll
      for (int i = 0; i < Count / 2; i++) {
        const uint4 x = load_cached16(from + 16 * i);
        bits[4 * i] = x.x, bits[4 * i + 1] = x.y, bits[4 * i + 2] = x.z, bits[4 * i + 3] = x.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Count; i++) {
        const uint2 x = load_cached8(from + 8 * i);
        bits[2 * i] = x.x, bits[2 * i + 1] = x.y;
      }
    }
  }

  // As of `TokenPairs`.
  __device__ __forceinline__ void clear(uint32_t g, uint32_t t, int tail) {
#pragma unroll
    for (int i = 0; i < 2 * Count; i++) {
      if ((int)((t * (2 * Count) + i) % 8 * 8 + g) >= tail) bits[i] = 0;
    }
  }

  // Largest step, in the low half.
  __device__ __forceinline__ uint32_t most_half() const {
    uint32_t most = bits[0];
#pragma unroll
    for (int i = 1; i < 2 * Count; i++) most = max_half2(most, bits[i]);
    return most;
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
