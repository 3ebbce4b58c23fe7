// For tests only: where the device functions think that bits lie, and the matrix instructions on what the kernels rely on.
//
//   check_layout  a thread a (token, channel): writes the place of each bit of its code, and of its pair.
//   check_mma     a warp a tile: a [16][k] and b [k][8], row-major, give d [16][8]. The codes as subnormal f16, and bytes.
#include "layout.cuh"
#include "ptx.cuh"

extern "C" __global__ void qkv_check_layout(const __grid_constant__ QkvCheckLayout p) {
  using namespace qkv;
  const uint32_t bits = code_bits(p.format);
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < QKV_TILE * p.at.dim; i += gridDim.x * blockDim.x) {
    uint32_t token = i / p.at.dim, channel = i % p.at.dim;
    for (uint32_t b = 0; b < bits; b++) {
      Place place = code_bit(p.format, p.at, p.order, token, channel, b);
      ((uint32_t*)p.bits)[i * bits + b] = 8 * place.byte + place.bit;
    }
    uint32_t low = ~0u, high = ~0u;
    pair_bytes(p.format, p.at, p.order, token, channel, low, high);
    ((uint32_t*)p.pairs)[2 * i] = low;
    ((uint32_t*)p.pairs)[2 * i + 1] = high;
  }
}

extern "C" __global__ void qkv_check_mma(const __grid_constant__ QkvCheckMma p) {
  using namespace qkv;
  const uint32_t lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint64_t warps = (uint64_t)gridDim.x * (blockDim.x / 32);
  for (uint64_t tile = (uint64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; tile < p.tiles; tile += warps) {
    uint32_t a[4], b[2], out[4];
    if (p.kind == 0) {
      const uint16_t *from = (const uint16_t*)p.a + tile * 256, *by = (const uint16_t*)p.b + tile * 128;
      for (int i = 0; i < 4; i++) {
        const uint16_t* q = from + (g + 8 * (i % 2)) * 16 + 2 * t + 8 * (i / 2);
        a[i] = q[0] | (uint32_t)q[1] << 16;
      }
      for (int i = 0; i < 2; i++) {
        const uint16_t* q = by + (2 * t + 8 * i) * 8 + g;
        b[i] = q[0] | (uint32_t)q[8] << 16;
      }
      float d[4] = {};
      mma_f16(d, a, b);
      for (int i = 0; i < 4; i++) out[i] = __float_as_uint(d[i]);
    } else {
      const uint8_t *from = (const uint8_t*)p.a + tile * 512, *by = (const uint8_t*)p.b + tile * 256;
      for (int i = 0; i < 4; i++) {
        const uint8_t* q = from + (g + 8 * (i % 2)) * 32 + 4 * t + 16 * (i / 2);
        a[i] = q[0] | (uint32_t)q[1] << 8 | (uint32_t)q[2] << 16 | (uint32_t)q[3] << 24;
      }
      for (int i = 0; i < 2; i++) {
        const uint8_t* q = by + (4 * t + 16 * i) * 8 + g;
        b[i] = q[0] | (uint32_t)q[8] << 8 | (uint32_t)q[16] << 16 | (uint32_t)q[24] << 24;
      }
      int32_t d[4] = {};
      if (p.kind == 1) {
        mma_u8_s8(d, a, b);
      } else {
        mma_u8_u8(d, a, b);
      }
      for (int i = 0; i < 4; i++) out[i] = d[i];
    }
    uint32_t* to = (uint32_t*)p.d + tile * 128;
    for (int i = 0; i < 4; i++) to[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = out[i];
  }
}
