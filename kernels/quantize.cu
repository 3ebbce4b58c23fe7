// Groups of up to 256 elements: see `quantize.cuh`.
#include "quantize.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) qkv_quantize(const __grid_constant__ QkvQuantize p) {
  extern __shared__ __align__(16) uint8_t memory[];
  qkv::quantize<8>(p, memory);
}
