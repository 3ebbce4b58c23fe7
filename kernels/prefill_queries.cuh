// A block of prefill: its shared memory, its work, and its query rows.
#pragma once
#include "hadamard.cuh"
#include "prefill_stage.cuh"

namespace qkv {

// How far weights are lifted.
constexpr float kLift = 7.0f;

template <int DK, int DV>
struct PrefillShared {
  static constexpr uint32_t kKey = 0, kValue = QKV_TILE * kRowBytes<DK>, kQuery = kValue + QKV_TILE * kRowBytes<DV>;
  // Warps that share 16 rows, and the value channels that one of them sums.
  static constexpr int kSharing = DV > 128 ? 2 : 1, kSummed = DV / kSharing;
  // Behind a row of queries: the factor of its scores, and q · mean.
  static constexpr uint32_t kRow = 2 * DK;

  // Query rows of a block: 64 or 128.
  static __device__ __forceinline__ uint32_t rows() { return blockDim.x / 2 / kSharing; }
};

// The block's work.
struct Work {
  QkvSequence s;
  uint32_t sequence, head;
  // First row and rows of the sequence, counted as token * group + head in the group.
  int32_t first, rows;
};

// The query rows into shared memory; a warp takes a row, a lane every 32nd channel. A barrier comes after. `pages`: rotated as keys are, and with q · mean.
template <int DK, int DV>
__device__ __forceinline__ void load_queries(const QkvPrefill& p, const Work& w, uint8_t* shared, bool pages) {
  using S = PrefillShared<DK, DV>;
  const uint32_t lane = threadIdx.x % 32, dim = p.q.dim, block = pages ? p.format[0].rotate : 0;
  const uint16_t* mean = nullptr;
  if (pages && p.means) mean = (const uint16_t*)p.means + ((uint64_t)w.s.seat * p.heads + w.head) * dim;
  const float size = fabsf(p.scale) * (p.softcap > 0.0f ? 1.0f : kLog2e);
  // The sign of the scale goes into the query, so that a larger score is a larger product.
  const float sign = p.scale > 0.0f ? 1.0f : p.scale < 0.0f ? -1.0f : 0.0f;
#pragma unroll 1
  for (uint32_t r = threadIdx.x / 32; r < S::rows(); r += blockDim.x / 32) {
    const int32_t flat = w.first + (int32_t)r;
    float x[DK / 32], dot = 0.0f;
    uint32_t most = 0;
    if (flat < w.rows) {
      const int64_t at = row_offset(p.q, w.s.first_row + flat / p.group, w.head * p.group + flat % p.group);
#pragma unroll
      for (int j = 0; j < DK / 32; j++) {
        const uint32_t c = 32 * j + lane;
        x[j] = c < dim ? load_element(p.q, at + c * p.q.strides[3]) : 0.0f;
        if (mean && c < dim) dot = fmaf(x[j], half_to_float(__ldg((const unsigned short*)mean + c)), dot);
      }
    } else {
#pragma unroll
      for (int j = 0; j < DK / 32; j++) x[j] = 0.0f;
    }
    if (block) {
#pragma unroll
      for (int j = 0; j < DK / 32; j++) {
        float one[1] = {x[j]};
        if (block == 32) {
          hadamard<1>(one, lane);
          x[j] = one[0];
        }
        if (block == 64 && j % 2 == 0 && j + 1 < DK / 32) {
          float two[2] = {x[j], x[j + 1]};
          hadamard<2>(two, lane);
          x[j] = two[0], x[j + 1] = two[1];
        }
        if (block == 128 && j % 4 == 0 && j + 3 < DK / 32) {
          float four[4] = {x[j], x[j + 1], x[j + 2], x[j + 3]};
          hadamard<4>(four, lane);
          x[j] = four[0], x[j + 1] = four[1], x[j + 2] = four[2], x[j + 3] = four[3];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < DK / 32; j++) most = max(most, bits_of(x[j]) & 0x7fffffff);
    most = __reduce_max_sync(0xffffffff, most);
#pragma unroll
    for (int o = 16; o > 0; o /= 2) dot += __shfl_xor_sync(0xffffffff, dot, o);
    int32_t unit = most == 0 ? 0 : max((int32_t)(most >> 23) - 127 - 13, -100);
    uint8_t* row = shared + S::kQuery + r * kRowBytes<DK>;
    const float up = sign * power_of_two(-unit);
#pragma unroll
    for (int j = 0; j < DK / 32; j++) *(uint16_t*)(row + 2 * (32 * j + lane)) = float_to_half(x[j] * up);
    // A query that has no number makes its row none.
    if (lane == 0) {
      const float f = most < bits_of(kInfinity) ? size * power_of_two(unit) : kInfinity - kInfinity;
      *(float2*)(row + S::kRow) = make_float2(f, sign * size * dot);
    }
  }
}

}  // namespace qkv
