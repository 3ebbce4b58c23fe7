// FP8 of whole tensors [tokens, heads, dim]: byte = satfinite(x / scale), x = scale * float(byte), and the scales themselves.
//
// Rows (token, head) are worked on by L lanes each, L a power of two up to 32: a lane holds 4 (f32) or 8 neighbouring channels at
// a time, 16 bytes of the tensor, so that a warp reads and writes whole sectors. Rows that are no vectors go element by element.
//   encode  reads the tensor once, writes a byte an element; with `fit`, a first look at the row finds its scale. Up to
//           kHeld vectors a lane stay in registers in between (dim <= 256 in f32), longer rows are read twice.
//   decode  the way back.
//   absmax  largest finite magnitudes: one a row, or one a head or tensor by integer maxima in a workspace, which the last block
//           turns into scales and clears.
#include "fp8.cuh"
#include "tensor.cuh"

namespace qkv {

constexpr uint32_t kHeld = 2;

// How rows are spread over lanes.
struct Rows {
  uint32_t vector, items, lanes;
  __device__ Rows(const QkvTensor& x) {
    vector = !rows_are_vectors(x) ? 1 : x.dtype == QKV_F32 ? 4 : 8;
    items = x.dim / vector;
    lanes = 32;
    while (lanes > 1 && lanes / 2 >= items) lanes /= 2;
  }
};

__device__ __forceinline__ void load_item(const QkvTensor& t, const Rows& r, int64_t row, uint32_t item, float* x) {
  if (r.vector == 1) {
    x[0] = load_element(t, row + item * t.strides[3]);
  } else {
    const char* at = (const char*)t.data + (row + item * r.vector) * element_bytes(t.dtype);
    unpack_vector(t.dtype, __ldg((const uint4*)at), x);
  }
}

__device__ __forceinline__ uint32_t item_magnitude(const Rows& r, const float* x) {
  uint32_t m = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; i++) {
    if (i < r.vector) m = max(m, finite_magnitude(x[i]));
  }
  return m;
}

// Encodes one item; returns how many elements saturated.
__device__ __forceinline__ uint32_t encode_item(const QkvFp8& p, const Rows& r, uint64_t row, uint32_t item, float scale,
                                                float* x) {
  uint32_t lost = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; i++) {
    if (i >= r.vector) continue;
    bool finite = (bits_of(x[i]) & 0x7fffffff) < 0x7f800000;
    x[i] = quotient(x[i], scale);
    lost += finite && fp8_saturates(p.kind, x[i]);
  }
  uint8_t* at = (uint8_t*)p.bytes + row * p.x.dim + item * r.vector;
  if (r.vector == 1) {
    *at = fp8_encode1(p.kind, x[0]);
  } else if (r.vector == 4) {
    *(uint32_t*)at = fp8_encode4(p.kind, x);
  } else {
    *(uint2*)at = make_uint2(fp8_encode4(p.kind, x), fp8_encode4(p.kind, x + 4));
  }
  return lost;
}

__device__ __forceinline__ uint32_t reduce_max(uint32_t m, uint32_t lanes) {
  for (uint32_t s = lanes / 2; s > 0; s /= 2) m = max(m, __shfl_xor_sync(0xffffffff, m, s));
  return m;
}

__device__ __forceinline__ uint64_t scale_index(const QkvFp8& p, uint64_t row) {
  if (p.granularity == QKV_SCALE_TENSOR) return 0;
  return p.granularity == QKV_SCALE_HEAD ? row % p.x.heads : row;
}

// The row of this thread in round `i`, and whether there is one. All lanes of a warp take part in every round.
struct Walk {
  uint64_t rows, first, step;
  uint32_t lane;
  __device__ Walk(const QkvTensor& x, const Rows& r) {
    rows = x.tokens * x.heads;
    uint32_t per_block = blockDim.x / r.lanes;
    first = (uint64_t)blockIdx.x * per_block + threadIdx.x / r.lanes;
    step = (uint64_t)gridDim.x * per_block;
    lane = threadIdx.x % r.lanes;
  }
  // Rounds of the block's last row group, so that no lane leaves early.
  __device__ uint64_t rounds() const {
    uint64_t block = first - first % (step / gridDim.x);
    return block < rows ? (rows - block + step - 1) / step : 0;
  }
};

}  // namespace qkv

// One block an SM is all that is asked for: with fewer registers ptxas spills around the division.
extern "C" __global__ void __launch_bounds__(256, 1) qkv_fp8_encode(const __grid_constant__ QkvFp8 p) {
  using namespace qkv;
  Rows r(p.x);
  Walk w(p.x, r);
  uint32_t lost = 0;
  for (uint64_t i = 0, rounds = w.rounds(); i < rounds; i++) {
    uint64_t row = w.first + i * w.step;
    bool live = row < w.rows;
    int64_t at = live ? row_offset(p.x, row / p.x.heads, row % p.x.heads) : 0;
    uint32_t items = live ? r.items : 0;
    float held[kHeld][8];
#pragma unroll
    for (uint32_t k = 0; k < kHeld; k++) {
      uint32_t item = w.lane + k * r.lanes;
      if (item < items) load_item(p.x, r, at, item, held[k]);
    }
    float scale = 1.0f;
    if (p.fit) {
      uint32_t m = 0;
#pragma unroll
      for (uint32_t k = 0; k < kHeld; k++) {
        if (w.lane + k * r.lanes < items) m = max(m, item_magnitude(r, held[k]));
      }
      for (uint32_t item = w.lane + kHeld * r.lanes; item < items; item += r.lanes) {
        float x[8];
        load_item(p.x, r, at, item, x);
        m = max(m, item_magnitude(r, x));
      }
      scale = fp8_scale(p.kind, reduce_max(m, r.lanes));
      if (live && w.lane == 0) ((float*)p.scales)[row] = scale;
    } else if (live) {
      scale = __ldg((const float*)p.scales + scale_index(p, row));
    }
#pragma unroll
    for (uint32_t k = 0; k < kHeld; k++) {
      uint32_t item = w.lane + k * r.lanes;
      if (item < items) lost += encode_item(p, r, row, item, scale, held[k]);
    }
    for (uint32_t item = w.lane + kHeld * r.lanes; item < items; item += r.lanes) {
      float x[8];
      load_item(p.x, r, at, item, x);
      lost += encode_item(p, r, row, item, scale, x);
    }
  }
  if (p.saturated) {
    lost = __reduce_add_sync(0xffffffff, lost);
    if (threadIdx.x % 32 == 0 && lost) atomicAdd((unsigned long long*)p.saturated, (unsigned long long)lost);
  }
}

extern "C" __global__ void __launch_bounds__(256) qkv_fp8_decode(const __grid_constant__ QkvFp8 p) {
  using namespace qkv;
  Rows r(p.x);
  Walk w(p.x, r);
  for (uint64_t row = w.first; row < w.rows; row += w.step) {
    int64_t at = row_offset(p.x, row / p.x.heads, row % p.x.heads);
    float scale = __ldg((const float*)p.scales + scale_index(p, row));
    const uint8_t* bytes = (const uint8_t*)p.bytes + row * p.x.dim;
    for (uint32_t item = w.lane; item < r.items; item += r.lanes) {
      float x[8];
      if (r.vector == 1) {
        store_element(p.x, at + item * p.x.strides[3], mul(fp8_decode1(p.kind, __ldg(bytes + item)), scale));
        continue;
      }
      const uint32_t* words = (const uint32_t*)(bytes + item * r.vector);
      if (r.vector == 4) {
        fp8_decode4(p.kind, __ldg(words), x);
      } else {
        uint2 two = __ldg((const uint2*)words);
        fp8_decode4(p.kind, two.x, x);
        fp8_decode4(p.kind, two.y, x + 4);
      }
#pragma unroll
      for (uint32_t i = 0; i < 8; i++) {
        if (i < r.vector) x[i] = mul(x[i], scale);
      }
      char* to = (char*)p.x.data + (at + item * r.vector) * element_bytes(p.x.dtype);
      *(uint4*)to = pack_vector(p.x.dtype, x);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) qkv_fp8_absmax(const __grid_constant__ QkvFp8 p) {
  using namespace qkv;
  Rows r(p.x);
  Walk w(p.x, r);
  uint32_t* work = (uint32_t*)p.workspace;
  for (uint64_t i = 0, rounds = w.rounds(); i < rounds; i++) {
    uint64_t row = w.first + i * w.step;
    bool live = row < w.rows;
    int64_t at = live ? row_offset(p.x, row / p.x.heads, row % p.x.heads) : 0;
    uint32_t m = 0;
    for (uint32_t item = w.lane; item < (live ? r.items : 0); item += r.lanes) {
      float x[8];
      load_item(p.x, r, at, item, x);
      m = max(m, item_magnitude(r, x));
    }
    m = reduce_max(m, r.lanes);
    if (!live || w.lane != 0) continue;
    if (p.granularity == QKV_SCALE_TOKEN_HEAD) {
      ((float*)p.scales)[row] = fp8_scale(p.kind, m);
    } else {
      atomicMax(work + 1 + scale_index(p, row), m);
    }
  }
  if (p.granularity == QKV_SCALE_TOKEN_HEAD) return;
  // The block that comes last sees all maxima.
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(work, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  uint32_t scales = p.granularity == QKV_SCALE_TENSOR ? 1 : p.x.heads;
  for (uint32_t s = threadIdx.x; s < scales; s += blockDim.x) {
    uint32_t m = atomicExch(work + 1 + s, 0);
    ((float*)p.scales)[s] = fp8_scale(p.kind, m);
  }
  if (threadIdx.x == 0) *work = 0;
}
