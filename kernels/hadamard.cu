// Block Hadamard rotation of a tensor [tokens, heads, dim]: y = H x / sqrt(block) for each block of 32, 64 or 128 channels.
//
// A warp owns a block. Lane l holds channels r * 32 + l, r < block / 32: the butterflies of stride 32 and 64 are between
// registers, the smaller ones between lanes. Loads and stores of a register are 32 neighbouring channels.
// In place is allowed: a warp reads its block before it writes it.
#include "hadamard.cuh"
#include "tensor.cuh"

namespace qkv {

template <int R>
__device__ void rotate_block(const QkvHadamard& p, int64_t in, int64_t out, uint32_t lane) {
  float x[R];
#pragma unroll
  for (int r = 0; r < R; r++) x[r] = load_element(p.x, in + (r * 32 + lane) * p.x.strides[3]);
  hadamard<R>(x, lane);
#pragma unroll
  for (int r = 0; r < R; r++) store_element(p.out, out + (r * 32 + lane) * p.out.strides[3], x[r]);
}

}  // namespace qkv

extern "C" __global__ void __launch_bounds__(128) qkv_hadamard(const __grid_constant__ QkvHadamard p) {
  using namespace qkv;
  uint32_t lane = threadIdx.x % 32, blocks = p.x.dim / p.block;
  uint64_t count = p.x.tokens * p.x.heads * blocks;
  uint64_t warps = (uint64_t)gridDim.x * (blockDim.x / 32);
  for (uint64_t i = (uint64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < count; i += warps) {
    uint64_t row = i / blocks, token = row / p.x.heads;
    uint32_t head = row % p.x.heads, first = (i % blocks) * p.block;
    int64_t in = row_offset(p.x, token, head) + first * p.x.strides[3];
    int64_t out = row_offset(p.out, token, head) + first * p.out.strides[3];
    if (p.block == 32) rotate_block<1>(p, in, out, lane);
    if (p.block == 64) rotate_block<2>(p, in, out, lane);
    if (p.block == 128) rotate_block<4>(p, in, out, lane);
  }
}
