// The exact tokens of one sequence in one layer, sinks and window, to strided tensors: what `gather` leaves out. A warp takes a
// row (token, head, keys or values), a lane every 32nd channel.
#include "exact.cuh"

extern "C" __global__ void __launch_bounds__(128) qkv_exact_rows(const __grid_constant__ QkvExactRows p) {
  using namespace qkv;
  const uint32_t lane = threadIdx.x % 32, warps = blockDim.x / 32;
  // Sinks, then the tokens behind the pages and the sinks.
  const uint32_t sinks = min(p.sinks, p.len), first = max(p.packed, sinks);
  const uint64_t tokens = sinks + (p.len - first), rows = tokens * p.heads * 2;
  for (uint64_t i = (uint64_t)blockIdx.x * warps + threadIdx.x / 32; i < rows; i += (uint64_t)gridDim.x * warps) {
    const uint32_t op = i % 2, head = i / 2 % p.heads;
    const uint64_t n = i / 2 / p.heads;
    const bool sink = n < sinks;
    const uint64_t token = sink ? n : first + (n - sinks);
    const QkvTensor& out = p.out[op];
    const uint64_t row = sink ? token : token % p.window_rows, count = sink ? p.sinks : p.window_rows;
    const uint16_t* from =
        (const uint16_t*)(sink ? p.sink[op] : p.window[op]) + (((uint64_t)p.seat * p.heads + head) * count + row) * out.dim;
    const int64_t at = row_offset(out, token, head);
    for (uint32_t c = lane; c < out.dim; c += 32) store_element(out, at + c * out.strides[3], exact_value(p.dtype, from[c]));
  }
}
