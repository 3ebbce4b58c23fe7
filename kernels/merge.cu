// Merges a second partial attention result, over other keys, into a first one: the twin of `merge_states` in `src/attention.rs`.
//
// A warp has a row (token, head); all its lanes read both LSEs before one of them writes the new one. A state with LSE -inf has
// seen no key, so its output is not looked at: it may hold anything.
#include "exact.cuh"

namespace qkv {

// What becomes of a row.
enum class Merge { kKeep, kZero, kTake, kMix };

template <typename F>
__device__ __forceinline__ void merge_row(Merge what, uint32_t dim, bool vectors, F f) {
  if (what == Merge::kKeep) return;
  if (vectors) {
    for (uint32_t c = 4 * (threadIdx.x % 32); c < dim; c += 128) f(c, true);
  } else {
    for (uint32_t c = threadIdx.x % 32; c < dim; c += 32) f(c, false);
  }
}

}  // namespace qkv

extern "C" __global__ void __launch_bounds__(128) qkv_merge_states(const __grid_constant__ QkvMergeStates p) {
  using namespace qkv;
  const uint64_t rows = p.out.tokens * p.out.heads, warps = (uint64_t)gridDim.x * (blockDim.x / 32);
  const bool vectors = rows_are_vectors(p.out) && rows_are_vectors(p.other);
  for (uint64_t row = (uint64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += warps) {
    float *lse = (float*)p.lse + row, first = *lse, second = __ldg((const float*)p.other_lse + row);
    const bool empty = first == -kInfinity, other_empty = second == -kInfinity;
    // A NaN in either is kept by the sum below, whichever `fmaxf` picks.
    const float max = fmaxf(first, second);
    const float a = expf(sub(first, max)), b = expf(sub(second, max)), sum = add(a, b);
    Merge what = Merge::kMix;
    float merged = add(max, logf(sum));
    if (empty && other_empty) {
      what = Merge::kZero;
      merged = first;
    } else if (other_empty && first == first) {
      what = Merge::kKeep;
      merged = first;
    } else if (empty && second == second) {
      what = Merge::kTake;
      merged = second;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) *lse = merged;
    const uint64_t token = row / p.out.heads;
    const uint32_t head = (uint32_t)(row - token * p.out.heads);
    const int64_t to = row_offset(p.out, token, head), from = row_offset(p.other, token, head);
    merge_row(what, p.out.dim, vectors, [&](uint32_t c, bool four) {
      float x[4], y[4];
      if (four) {
        load4(p.out, true, to, c, x);
        load4(p.other, true, from, c, y);
      } else {
        x[0] = load_element(p.out, to + c * p.out.strides[3]);
        y[0] = load_element(p.other, from + c * p.other.strides[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (i > 0 && !four) break;
        float mixed = quotient(add(mul(a, x[i]), mul(b, y[i])), sum);
        x[i] = what == Merge::kZero ? 0.0f : what == Merge::kTake ? y[i] : mixed;
      }
      if (four) {
        store4(p.out, to + c, x);
      } else {
        store_element(p.out, to + c * p.out.strides[3], x[0]);
      }
    });
  }
}
