// Pairs and scales of a page's tokens, and of its channels.
#pragma once
#include "codes.cuh"

namespace qkv {

// The four lanes of a row hold the pairs of its tokens: lane t those of group t mod J, of J = 1, 2 or 4 groups a token (kernels for any
// format: all lanes those of one group at a time, as with J = 1). As operand A of 8 columns such a word is (step, min) in columns 2t and
// 2t + 1, so operand B says of which group something is made.
//
// Since 0 times NaN is NaN, a group that is not a number makes the token's others so, too. Of keys that is as it should be: the token's
// score is none. Of values such pairs are taken out first (`take_out`). Pairs are finite or both NaN, as the encoder writes them.

// Part `i` of three f16 numbers that add up to x.
__device__ __forceinline__ uint16_t part_of(float x, uint32_t i) {
  const uint16_t first = float_to_half(x);
  const float rest = x - half_to_float(first);
  const uint16_t second = float_to_half(rest), third = float_to_half(rest - half_to_float(second));
  return i == 0 ? first : i == 1 ? second : third;
}

// Products with a token's J pairs that add up min * (sum of a group's queries), which comes in three parts.
template <int J>
constexpr int kZeroProducts = J > 2 ? 3 : J;

// Row 2t + 1 of operand B of product i: a part of the sum of group t mod J. With fewer groups than lanes a product has several parts.
template <int J>
__device__ __forceinline__ uint32_t zero_operand(float sum, uint32_t i, uint32_t t) {
  static_assert(J == 1 || J == 2 || J == 4);
  const uint32_t part = i * (4 / J) + t / J;
  return part < 3 ? (uint32_t)part_of(sum, part) << 16 : 0;
}

// The middle of the codes of a format of `bits`, and the same as f16.
__host__ __device__ constexpr float middle_code(int bits) { return 0.5f * ((1 << bits) - 1); }
__host__ __device__ constexpr uint32_t middle_code_half(int bits) {
  return (uint32_t)((13 + bits) << 10 | ((1 << (bits - 1)) - 1) << (11 - bits));
}

// Operands B of 8 x 8 elements, for each group of a token: lane 4n + t has rows 2t and 2t + 1 of column n, so the group's number shifts
// them by a lane. In shared memory: where registers are short, reading one costs less than making it.
struct PairOperands {
  uint32_t at[36];

  // By one warp: `even` for even columns, `odd` for odd ones.
  __device__ __forceinline__ void set(uint32_t lane, uint32_t even, uint32_t odd) {
    for (uint32_t i = lane; i < 36; i += 32) at[i] = i % 4 != 3 ? 0 : i / 4 % 2 == 0 ? even : odd;
  }

  __device__ __forceinline__ uint32_t of(uint32_t lane, int group) const { return load_shared(shared_address(at + lane + 3 - group)); }
};

// Factors of a pair, in f16: (step, min) to min, or to what `code` decodes as; and to the step.
__device__ __forceinline__ uint32_t min_factors(uint32_t code = 0) { return 0x3c000000 | code; }
constexpr uint32_t kStepFactor = 0x3c00;

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

  // Largest step. With `Nan`: NaN if one is.
  template <bool Nan>
  __device__ __forceinline__ float most_half() const {
    uint32_t most = bits[0];
#pragma unroll
    for (int i = 1; i < 8; i++) most = Nan ? max_half2_nan(most, bits[i]) : max_half2(most, bits[i]);
    return half_to_float((uint16_t)most);
  }

  // Makes pairs that are not numbers 0. Bit t of the result: some of group t mod J was none.
  template <int J>
  __device__ __forceinline__ uint32_t take_out() {
    bool none = false;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const bool nan = (bits[i] & 0x7fff) > 0x7c00 || (bits[i] >> 16 & 0x7fff) > 0x7c00;
      none |= nan;
      bits[i] = nan ? 0 : bits[i];
    }
    uint32_t lanes = __ballot_sync(0xffffffff, none);
#pragma unroll
    for (int s = 4; s < 32; s *= 2) lanes |= lanes >> s;
    return lanes & ((1u << J) - 1);
  }

  __device__ __forceinline__ float most_float() const {
    float most = from_bits(bits[0]);
#pragma unroll
    for (int i = 1; i < 8; i++) most = fmaxf(most, from_bits(bits[i]));
    return most;
  }

  // Steps, and mins or what else even columns of the `operand` make, of tokens 16 kb + g and 16 kb + g + 8.
  __device__ __forceinline__ void values(int kb, uint32_t operand, float (&step)[2], float (&base)[2]) const {
    float q[4] = {};
    mma_f16_k8(q, bits[2 * kb], bits[2 * kb + 1], operand);
    step[0] = q[1], step[1] = q[3];
    base[0] = q[0], base[1] = q[2];
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
