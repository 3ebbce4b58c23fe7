// Encodes a unit of rows that lies in shared memory as f32 `[token][stride]`: rotation, fits, and codes as bytes and pairs as
// words, both in shared memory too. `quantize` and `append` share it; what it writes is what `src/quant` computes, to the bit.
//
// Groups are dealt to the warps in row order, 32 / L to a warp at a time (`group.cuh`). No two lanes meet in a bank:
// * per token, element r * L + l of a group is word r * L + l of its row, and all groups begin at multiples of 32 words where
//   `group` is one. So the group in slot k of the warp reads register r ^ k: its L words lie beside those of the other slots.
//   A row that begins in bank 16 changes k by 16 / L. Codes are bytes, so the same holds with words for 4 channels, if the
//   row of codes begins at 16 bytes modulo 32 exactly where the row of floats begins in bank 16;
// * per channel, slots are neighbouring channels and lanes are tokens: rows begin 32 / L banks apart.
#pragma once
#include "fit.cuh"
#include "hadamard.cuh"

namespace qkv {

struct Unit {
  float* x;
  // Words between tokens.
  uint32_t stride;
  uint32_t tokens;
  uint32_t channels;
  // Tokens at the front that take no part: their codes are 0 and they leave no trace in pairs.
  uint32_t skip;
};

// The least number that is at least n and is `rest` modulo `step`.
__host__ __device__ constexpr uint32_t least_with(uint32_t n, uint32_t step, uint32_t rest) {
  return n <= rest ? rest : (n - rest + step - 1) / step * step + rest;
}

// Words between the rows of a unit of that many channels, with code rows of `code_stride_for`. Per channel it is a multiple of 4
// for groups of up to 64.
__host__ __device__ constexpr uint32_t unit_stride(uint32_t channels, uint32_t per_channel, uint32_t group) {
  if (!per_channel) return least_with(channels, 32, 16);
  return least_with(channels, 32, group <= 32 ? 8 : group <= 64 ? 4 : group <= 128 ? 2 : 1);
}

// Bytes between the rows of a code buffer.
__host__ __device__ constexpr uint32_t code_stride_for(uint32_t channels) { return least_with(channels, 128, 16); }

// Fits all groups of a unit, or, where `given` is not null, takes (step, min) from there. Codes go to
// codes[token * code_stride + channel], pair words to `pairs`, given ones come from `given`, all in shared memory: pairs in row
// order, [token][group] or [token group][pair_stride] by channel. Returns how many elements this thread's lanes clamped.
template <int R>
__device__ __forceinline__ uint32_t encode_groups(const QkvFormat& f, Unit u, uint8_t* codes, uint32_t code_stride,
                                                  uint32_t* pairs, uint32_t pair_stride, const float2* given) {
  const uint32_t lane = threadIdx.x % 32;
  const bool per_channel = f.per_channel;
  const uint32_t length = per_channel ? u.tokens : u.channels, across = per_channel ? u.channels : u.tokens;
  const uint32_t along = (length + f.group - 1) / f.group, all = along * across;
  const uint32_t lanes = padded(min(f.group, length)) / R, slots = 32 / lanes;
  const uint32_t slot = lane / lanes, l = lane % lanes;
  const uint32_t words = per_channel ? u.stride : 1, bytes = per_channel ? code_stride : 1;
  const float max = (float)((1u << f.bits) - 1);
  uint32_t clamped = 0;
  for (uint32_t first = threadIdx.x / 32 * slots; first < all; first += blockDim.x / 32 * slots) {
    // Group a along the axis, b across it. Slots beyond the last group hold nothing.
    const uint32_t i = first + slot, outer = i / (per_channel ? across : along);
    const uint32_t inner = i - outer * (per_channel ? across : along);
    const uint32_t a = per_channel ? outer : inner, b = per_channel ? inner : outer;
    const uint32_t start = a * f.group, size = i < all ? min(f.group, length - start) : 0;
    uint32_t skip = b < u.skip ? size : 0;
    if (per_channel) skip = u.skip > start ? min(u.skip - start, size) : 0;
    const uint32_t key = per_channel ? 0 : slot ^ ((b * (u.stride / 16) & 1) * (16 / lanes));
    auto element = [&](int r) { return ((uint32_t)r ^ key) * lanes + l; };
    const float* x = u.x + (per_channel ? start * words + b : b * u.stride + start);
    Group<R> g;
    g.live = 0;
    g.lanes = lanes;
    g.count = size - skip;
    g.lo = g.hi = 0.0f;
#pragma unroll
    for (int r = 0; r < R; r++) {
      const uint32_t e = element(r);
      const bool counts = e < size && e >= skip;
      g.live |= (uint32_t)counts << r;
      g.x[r] = counts ? x[e * words] : 0.0f;
    }
    const uint32_t place = per_channel ? a * pair_stride + b : i;
    float step = 0.0f, low = 0.0f;
    bool open = i < all;
    if (given) {
      if (open) {
        step = given[place].x;
        low = given[place].y;
      }
    } else {
      uint32_t pair;
      open = prepare(g, pair, clamped);
      const uint32_t fitted = fit_pair(f, g, open, max);
      if (open) pair = fitted;
      step = half_to_float((uint16_t)pair);
      low = half_to_float((uint16_t)(pair >> 16));
      if (l == 0 && i < all) pairs[place] = pair;
    }
    const float div = divisor(step);
    uint8_t* out = codes + (per_channel ? start * bytes + b : b * code_stride + start);
#pragma unroll
    for (int r = 0; r < R; r++) {
      const uint32_t e = element(r);
      const uint32_t code = open && g.counts(r) ? code_of(g.x[r], div, low, max) : 0;
      if (e < size) out[e * bytes] = (uint8_t)code;
    }
  }
  return clamped;
}

// Fits all groups of a unit: see `encode_groups`. Called by all threads of a block after a __syncthreads. R = 8, or 16 for
// groups of more than 256 channels.
template <int R>
__device__ __forceinline__ uint32_t encode_affine(const QkvFormat& f, Unit u, uint8_t* codes, uint32_t code_stride,
                                                  uint32_t* pairs) {
  return encode_groups<R>(f, u, codes, code_stride, pairs, u.channels, nullptr);
}

// Clamps a finite element beyond +-65504 and counts it.
__device__ __forceinline__ float clamp_finite(float x, uint32_t& clamped) {
  uint32_t a = bits_of(x) & 0x7fffffff;
  if (a <= bits_of(kLimit) || a >= bits_of(kInfinity)) return x;
  clamped++;
  return x < 0.0f ? -kLimit : kLimit;
}

// One block of 32 R channels of a row, `x` its first element. A warp; lane l has channels r * 32 + l.
template <int R>
__device__ __forceinline__ uint32_t transform_block(float* x, const uint16_t* mean, bool clamp, bool rotate) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t clamped = 0;
  float y[R];
#pragma unroll
  for (int r = 0; r < R; r++) {
    y[r] = x[r * 32 + lane];
    if (clamp) y[r] = clamp_finite(y[r], clamped);
    if (mean) y[r] = sub(y[r], half_to_float(mean[r * 32 + lane]));
  }
  if (rotate) hadamard<R>(y, lane);
#pragma unroll
  for (int r = 0; r < R; r++) x[r * 32 + lane] = y[r];
  return clamped;
}

// Rotates the rows of a unit from `skip` on; with `clamp`, finite values beyond +-65504 are clamped and the mean is subtracted
// before, as pages are encoded. Channels are a multiple of the block. Called by all threads of a block, between two barriers.
__device__ __forceinline__ uint32_t transform_rows(const QkvFormat& f, Unit u, const uint16_t* mean, bool clamp) {
  const uint32_t block = f.rotate ? f.rotate : 32, blocks = (u.channels + block - 1) / block;
  uint32_t clamped = 0;
  for (uint32_t i = threadIdx.x / 32; i < (u.tokens - min(u.skip, u.tokens)) * blocks; i += blockDim.x / 32) {
    const uint32_t token = u.skip + i / blocks, channel = i % blocks * block;
    float* x = u.x + token * u.stride + channel;
    const uint16_t* m = mean ? mean + channel : nullptr;
    if (block == 32) {
      // Without a rotation the last block may be short.
      if (f.rotate || channel + threadIdx.x % 32 < u.channels) clamped += transform_block<1>(x, m, clamp, f.rotate);
    } else if (block == 64) {
      clamped += transform_block<2>(x, m, clamp, true);
    } else {
      clamped += transform_block<4>(x, m, clamp, true);
    }
  }
  return clamped;
}

// What a page's rows go through before the fit (`src/quant/page.rs`): nothing if they are neither rotated nor centred. Returns
// how many elements this thread clamped.
__device__ __forceinline__ uint32_t transform(const QkvFormat& f, Unit u, const uint16_t* mean) {
  return f.rotate || mean ? transform_rows(f, u, mean, true) : 0;
}

}  // namespace qkv
