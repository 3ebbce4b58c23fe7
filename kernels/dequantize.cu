// Affine codes and pairs of a tensor [tokens, heads, dim], decoded: step * code + min, un-rotated, rounded once.
//
// A block brings some rows of codes and their pairs to shared memory, unpacks the codes to bytes, and decodes (decode.cuh). Codes
// and pairs are read once. A unit of work is
//   row order, per token    `rows` neighbouring rows (token, head): codes and pairs are one range each;
//   row order, per channel  one token group of `unit_heads` heads, whose pairs stay in shared memory while its rows pass;
//   fragment order          a tile of 64 tokens of one head.
#include "decode.cuh"
#include "pack.cuh"

namespace qkv {

extern __shared__ uint4 shared[];

__device__ __forceinline__ void copy_words(const uint32_t* from, uint32_t* to, uint32_t words) {
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) to[i] = __ldg(from + i);
}

struct Dequantize {
  const QkvDequantize& p;
  uint8_t* codes;
  uint32_t* pairs;
  // Tiles or token groups of a batch row, of all; parts of the heads.
  uint64_t per_batch, groups;
  uint32_t parts;

  __device__ Dequantize(const QkvDequantize& p)
      : p(p), codes((uint8_t*)shared), pairs((uint32_t*)(codes + p.rows * p.code_stride)) {
    const uint32_t group = p.order == QKV_ORDER_FRAGMENT ? QKV_TILE : p.format.group;
    per_batch = (p.out.batch_tokens + group - 1) / group;
    groups = p.out.tokens / p.out.batch_tokens * per_batch;
    parts = (p.out.heads + p.unit_heads - 1) / p.unit_heads;
  }

  __device__ __forceinline__ uint64_t units() const {
    if (p.order == QKV_ORDER_FRAGMENT) return groups * p.out.heads;
    return p.format.per_channel ? groups * parts : (p.out.tokens * p.out.heads + p.rows - 1) / p.rows;
  }

  __device__ __forceinline__ uint32_t pair_stride() const {
    if (p.order == QKV_ORDER_FRAGMENT) return p.format.per_channel ? p.at.dim : p.at.pair_count / QKV_TILE;
    // Pairs of different heads begin in different banks.
    if (p.format.per_channel) return (p.at.dim << p.wide) + 4;
    return (p.at.dim + p.format.group - 1) / p.format.group << p.wide;
  }

  // Loads the next rows of a unit, of which `done` were before; true if they are its last.
  __device__ __forceinline__ bool load(uint64_t unit, uint32_t done, Run& run) const {
    const uint32_t heads = p.out.heads;
    if (p.order == QKV_ORDER_FRAGMENT) {
      uint64_t tile = unit % groups, start = tile % per_batch * QKV_TILE;
      move_fragment<false>(p.format, p.at, codes, p.code_stride, pairs, (uint8_t*)p.codes + unit * p.at.code_bytes,
                           (uint8_t*)p.pairs + unit * p.at.pair_bytes);
      uint32_t rows = min((uint64_t)QKV_TILE, p.out.batch_tokens - start);
      run = {tile / per_batch * p.out.batch_tokens + start, (uint32_t)(unit / groups), 1, 0, rows};
      return true;
    }
    RowsAt<const uint8_t> in{nullptr, p.at.row_bytes, 0, (uint64_t)heads * p.at.row_bytes};
    bool last = true;
    if (p.format.per_channel) {
      uint64_t group = unit / parts, start = group % per_batch * p.format.group;
      uint32_t tokens = min((uint64_t)p.format.group, p.out.batch_tokens - start);
      uint32_t head = unit % parts * p.unit_heads, per = min(p.unit_heads, heads - head);
      uint64_t token = group / per_batch * p.out.batch_tokens + start;
      const uint32_t words = p.at.dim << p.wide;
      for (uint32_t h = 0; done == 0 && h < per; h++) {
        copy_words((const uint32_t*)p.pairs + ((head + h) * groups + group) * words, pairs + h * (words + 4), words);
      }
      // Whole tokens, so that runs of heads begin where a pass begins.
      uint32_t rows = min(p.rows / per * per, tokens * per - done);
      in.first = (const uint8_t*)p.codes + ((token + done / per) * heads + head) * p.at.row_bytes;
      in.per = per == heads ? 0 : per;
      run = {token, head, per, done, rows};
      last = done + rows == tokens * per;
    } else {
      uint64_t first = unit * p.rows;
      uint32_t rows = min((uint64_t)p.rows, p.out.tokens * heads - first), words = pair_stride();
      copy_words((const uint32_t*)p.pairs + first * words, pairs, rows * words);
      in.first = (const uint8_t*)p.codes + first * p.at.row_bytes;
      run = {first / heads, 0, heads, (uint32_t)(first % heads), rows};
    }
    read_rows(p.format.bits, p.at.dim, run.rows, in, codes, p.code_stride);
    return last;
  }
};

}  // namespace qkv

extern "C" __global__ void __launch_bounds__(128) qkv_dequantize(const __grid_constant__ QkvDequantize p) {
  using namespace qkv;
  const Dequantize d(p);
  const Coded coded{p.format, p.at.dim, d.codes, p.code_stride, d.pairs, p.wide, d.pair_stride(), 0.0f, nullptr};
  uint64_t unit = blockIdx.x;
  for (uint32_t done = 0; unit < d.units();) {
    Run run;
    bool last = d.load(unit, done, run);
    __syncthreads();
    store_rows<false>(coded, p.out, run);
    __syncthreads();
    done = last ? 0 : done + run.rows;
    unit += last ? gridDim.x : 0;
  }
}
