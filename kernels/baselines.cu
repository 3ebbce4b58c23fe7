// For benchmarks only: what the other kernels are held against on the same card in the same run.
//
//   stream_read   the XOR of all words: every byte is read once, and one word is written, so that no load can be left out.
//   stream_copy   every byte read once and written once.
//   plain_append  rows of 16-bit keys and values to their slots, as caches without quantization do it.
#include "abi.h"

namespace qkv {

// Loads in flight a thread: 128 KB a multiprocessor that is full, more than any needs to hide the way to memory.
constexpr int UNROLL = 4;

__device__ __forceinline__ uint4 load(const uint4* from) { return __ldg(from); }

}  // namespace qkv

extern "C" __global__ void __launch_bounds__(256) qkv_stream_read(const __grid_constant__ QkvStream p) {
  using namespace qkv;
  const uint4* from = (const uint4*)p.from;
  const uint64_t threads = (uint64_t)gridDim.x * blockDim.x;
  uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  uint4 sum = {};
  auto add = [&](uint4 v) {
    sum.x ^= v.x;
    sum.y ^= v.y;
    sum.z ^= v.z;
    sum.w ^= v.w;
  };
  for (; i + (UNROLL - 1) * threads < p.vectors; i += UNROLL * threads) {
    uint4 v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) v[u] = load(from + i + u * threads);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) add(v[u]);
  }
  for (; i < p.vectors; i += threads) add(load(from + i));
  uint32_t word = __reduce_xor_sync(~0u, sum.x ^ sum.y ^ sum.z ^ sum.w);
  if (threadIdx.x % 32 == 0) atomicXor((uint32_t*)p.to, word);
}

extern "C" __global__ void __launch_bounds__(256) qkv_stream_copy(const __grid_constant__ QkvStream p) {
  using namespace qkv;
  const uint4* from = (const uint4*)p.from;
  uint4* to = (uint4*)p.to;
  const uint64_t threads = (uint64_t)gridDim.x * blockDim.x;
  uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + (UNROLL - 1) * threads < p.vectors; i += UNROLL * threads) {
    uint4 v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) v[u] = load(from + i + u * threads);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) to[i + u * threads] = v[u];
  }
  for (; i < p.vectors; i += threads) to[i] = load(from + i);
}

// A thread a vector: first those of keys, then those of values.
extern "C" __global__ void __launch_bounds__(128) qkv_plain_append(const __grid_constant__ QkvPlainAppend p) {
  const uint64_t vectors = (uint64_t)p.rows * (p.row_vectors[0] + p.row_vectors[1]);
  const uint64_t threads = (uint64_t)gridDim.x * blockDim.x;
  for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += threads) {
    const uint64_t keys = (uint64_t)p.rows * p.row_vectors[0];
    const uint32_t operand = i >= keys, width = p.row_vectors[operand];
    const uint64_t at = operand ? i - keys : i;
    const uint64_t row = at / width, column = at % width;
    const int64_t slot = ((const int64_t*)p.slot_mapping)[row];
    if (slot < 0 || slot >= (int64_t)p.slots) continue;
    ((uint4*)p.to[operand])[(uint64_t)slot * width + column] = ((const uint4*)p.from[operand])[at];
  }
}
