// The pair of a group, to the bit as `src/quant/fit.rs` finds it. All lanes of a warp run a fit together, whatever their groups
// need: a group that is `open` is finite, clamped and not constant; the others go through the motions and their result is
// not used, so that shuffles always meet a whole warp. Candidates are worked on one after the other, which keeps registers few.
#pragma once
#include "group.cuh"

namespace qkv {

struct Pair {
  float step;
  float min;
};

// A pair rounded half to even after clamping to what f16 holds, still as f32.
__device__ __forceinline__ Pair nearest(float step, float min) {
  step = step < kLimit ? step : kLimit;
  min = min < kLimit ? min : kLimit;
  min = min > -kLimit ? min : -kLimit;
  return {round_half(step), round_half(min)};
}

__device__ __forceinline__ uint32_t pair_word(Pair p) { return pair_word(float_to_half(p.step), float_to_half(p.min)); }

// mean +- E|x - mean|, for codes of 1 bit.
template <int R>
__device__ __forceinline__ uint32_t two_levels(const Group<R>& g) {
  float n = (float)g.count, t[R];
#pragma unroll
  for (int r = 0; r < R; r++) t[r] = g.x[r];
  float mean = quotient(group_sum(g, t), n);
#pragma unroll
  for (int r = 0; r < R; r++) t[r] = fabsf(sub(g.x[r], mean));
  float spread = quotient(group_sum(g, t), n);
  return pair_word(nearest(mul(2.0f, spread), sub(mean, spread)));
}

// The smallest squared error of nine ranges around one centre and two least-squares refits of each; the first on ties, a range
// before its refits.
template <int R>
__device__ __forceinline__ uint32_t least_squares(const Group<R>& g, bool open, float max) {
  const float n = (float)g.count;
  const float centre = mul(add(g.lo, g.hi), 0.5f), half = mul(sub(g.hi, g.lo), 0.5f);
  float t[R], q[R];
  // Sums are taken around the centre: the products would cancel for data far from 0.
#pragma unroll
  for (int r = 0; r < R; r++) t[r] = sub(g.x[r], centre);
  const float mean = quotient(group_sum(g, t), n);
  Pair best = {0.0f, 0.0f};
  float least = kInfinity;
#pragma unroll 1
  for (int c = 0; c < 9; c++) {
    // 1, 0.95 .. 0.6, as their literals are rounded.
    const float shrink = quotient((float)(20 - c), 20.0f);
    Pair p = nearest(quotient(mul(mul(2.0f, half), shrink), max), sub(centre, mul(half, shrink)));
    if (c == 0) best = p;
    bool active = open;
#pragma unroll 1
    for (int stage = 0; stage < 3; stage++) {
      if (!__any_sync(kAll, active)) break;
      const float div = divisor(p.step);
#pragma unroll
      for (int r = 0; r < R; r++) {
        q[r] = round_code(quotient(sub(g.x[r], p.min), div), max);
        float e = sub(g.x[r], add(mul(p.step, q[r]), p.min));
        t[r] = mul(e, e);
      }
      float error = group_sum(g, t);
      if (active && (error < least || (c == 0 && stage == 0))) {
        least = error;
        best = p;
      }
      if (stage == 2) break;
      // Codes grow with x: all are equal if those of the extremes are. A refit then keeps the pair.
      active &= round_code(quotient(sub(g.lo, p.min), div), max) != round_code(quotient(sub(g.hi, p.min), div), max);
#pragma unroll
      for (int r = 0; r < R; r++) t[r] = mul(q[r], q[r]);
      float squares = group_sum(g, t);
#pragma unroll
      for (int r = 0; r < R; r++) t[r] = mul(q[r], sub(g.x[r], centre));
      float products = group_sum(g, t);
      float sum = group_sum(g, q);
      float code_mean = quotient(sum, n);
      float variance = sub(squares, mul(code_mean, sum));
      float step = quotient(sub(products, mul(sum, mean)), variance);
      step = step > 0.0f ? step : 0.0f;
      Pair refit = nearest(step, add(centre, sub(mean, mul(step, code_mean))));
      // One that keeps the pair has the same error and cannot win.
      active &= refit.step != p.step || refit.min != p.min;
      p = refit;
    }
  }
  return pair_word(best);
}

// a^c for 0 < a < 2^18 and -1 < c < 0: exp2(c * log2 a) by the CPU's polynomials.
__device__ __forceinline__ float power(float a, float c) {
  int32_t exponent = (int32_t)(bits_of(a) - 0x3f3504f3u) >> 23;
  float t = sub(from_bits(bits_of(a) - ((uint32_t)exponent << 23)), 1.0f);
  float p = -0.3296299f;
  p = add(mul(p, t), 0.5175096f);
  p = add(mul(p, t), -0.7249042f);
  p = add(mul(p, t), 1.4417607f);
  float y = mul(c, add((float)exponent, mul(p, t)));
  float n = add(y, kMagic);
  float f = sub(y, sub(n, kMagic));
  p = 0.05517167f;
  p = add(mul(p, f), 0.24261114f);
  p = add(mul(p, f), 0.69326097f);
  p = add(mul(p, f), 0.99992806f);
  return from_bits(bits_of(p) + (bits_of(n) << 23));
}

// The step of the range, and a min found by half-quadratic iterations; each group stops by itself.
template <int R>
__device__ __forceinline__ uint32_t half_quadratic(const Group<R>& g, bool open, float max, uint32_t iterations, float exponent,
                                                   float weight) {
  const float n = (float)g.count;
  float step = nearest(quotient(sub(g.hi, g.lo), max), 0.0f).step;
  // The smallest positive f16.
  const float tiny = from_bits((127 - 24) << 23);
  step = step > tiny ? step : tiny;
  const float inverse = quotient(1.0f, step);
  float min = g.lo, best = kInfinity;
  bool running = open;
#pragma unroll 1
  for (uint32_t i = 0; i < iterations && __any_sync(kAll, running); i++) {
    float error[R], shift[R];
#pragma unroll
    for (int r = 0; r < R; r++) {
      float code = round_code(mul(sub(g.x[r], min), inverse), max);
      float e = sub(g.x[r], add(mul(step, code), min));
      float a = fabsf(e);
      float w = mul(power(a, exponent), weight);
      w = w < a ? w : a;
      error[r] = a;
      shift[r] = from_bits(bits_of(w) | (bits_of(e) & 0x80000000));
    }
    float total = group_sum(g, error);
    float moved = quotient(group_sum(g, shift), n);
    if (running) {
      min = add(min, moved);
      running = total < best;
      best = total;
    }
  }
  return pair_word({step, nearest(0.0f, min).min});
}

// The pair of an open group by the format's fit.
template <int R>
__device__ __forceinline__ uint32_t fit_pair(const QkvFormat& f, const Group<R>& g, bool open, float max) {
  if (f.fit == QKV_FIT_MIN_MAX) return min_max(g.lo, g.hi, max);
  if (f.fit == QKV_FIT_HQQ) return half_quadratic(g, open, max, f.iterations, f.exponent, f.weight);
  return f.bits == 1 ? two_levels(g) : least_squares(g, open, max);
}

}  // namespace qkv
