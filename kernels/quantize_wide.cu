// One group a head of more than 256 channels, as a cache can hold it: see `quantize.cuh`.
#include "quantize.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) qkv_quantize_wide(const __grid_constant__ QkvQuantize p) {
  extern __shared__ __align__(16) uint8_t memory[];
  qkv::quantize<16>(p, memory);
}
