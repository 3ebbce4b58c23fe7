// New keys and values of a batch into one layer of a cache, in one launch.
//
// Windowed mode. A block of threads has one head's keys or values of one sequence. It closes every tile that has tokens in the
// window (old ones from there, new ones from the input), then writes the new tokens that stay exact; the order matters, since a
// new row may take the slot of a token that a tile still needs. Tiles made of new tokens only are closed by other blocks, straight
// from the input: the tile whose first row is in 64 j .. 64 j + 63 belongs to block j, and there is at most one, since tiles do not
// share rows. Input is rounded to the dtype of the window first, so it makes no difference whether a token waited there: chunked
// and one-shot appends give the same pages.
//
// Direct mode. A block has kRows rows of the input, one head, keys or values; each row goes to its slot.
//
// Shared memory: the tile as f32, its codes, its pairs, and the mean of centred keys. Where nothing closes, a block reads its
// rows and writes them, and nothing else.
#include "exact.cuh"
#include "pack.cuh"
#include "scatter.cuh"
#include "tile.cuh"

namespace qkv {

// Rows of a block in direct mode.
constexpr uint32_t kRows = 8;

// One operand and head of the layer, and the block's shared memory.
struct Operand {
  const QkvFormat& format;
  const QkvOperand& at;
  const QkvTensor& input;
  uint32_t op, head, stride, code_stride;
  bool vectors;
  float scale;
  float* x;
  uint8_t* codes;
  uint32_t* pairs;

  __device__ Operand(const QkvAppend& p, uint32_t op, uint32_t head, uint8_t* shared)
      : format(p.format[op]), at(p.at[op]), input(p.input[op]), op(op), head(head) {
    stride = tile_stride(format, at.dim);
    code_stride = tile_code_stride(format, at.dim);
    vectors = rows_are_vectors(input);
    scale = p.scales[op] ? __ldg((const float*)p.scales[op] + head) : 1.0f;
    x = (float*)shared;
    codes = shared + p.tile_bytes;
    pairs = (uint32_t*)(codes + p.code_bytes);
  }
};

// Rows [rows][dim] of one seat and head.
__device__ __forceinline__ uint16_t* exact_rows(const QkvAppend& p, uint64_t base, uint32_t rows, const Operand& o, int32_t seat) {
  return (uint16_t*)base + ((uint64_t)seat * p.heads + o.head) * rows * o.at.dim;
}

// The 64 tokens of a tile as f32, rounded to the dtype of the window; sinks are 0. Returns new values clamped.
__device__ uint32_t gather(const QkvAppend& p, const Operand& o, const QkvSequence& s, int32_t tile) {
  const uint32_t quads = o.at.dim / 4;
  const uint16_t* window = exact_rows(p, p.window[o.op], p.window_rows, o, s.seat);
  uint32_t clamped = 0;
  for (uint32_t i = threadIdx.x; i < QKV_TILE * quads; i += blockDim.x) {
    uint32_t row = i / quads, channel = i % quads * 4;
    int32_t t = tile * QKV_TILE + row;
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (t >= s.old_len && t >= (int32_t)p.sinks) {
      float y[4];
      load4(o.input, o.vectors, row_offset(o.input, s.first_row + (t - s.old_len), o.head), channel, y);
      unpack4(p.window_dtype, exact4(p.window_dtype, y, clamped), x);
    } else if (t >= (int32_t)p.sinks) {
      unpack4(p.window_dtype, *(const uint2*)(window + (uint64_t)(t % p.window_rows) * o.at.dim + channel), x);
    }
    *(float4*)(o.x + row * o.stride + channel) = make_float4(x[0], x[1], x[2], x[3]);
  }
  return clamped;
}

// Mean of one channel of tile 0 over its finite values from `skip` on, as f16. The sum is the tree of every group: halves onto each
// other. Visited depth first, with one partial sum a level.
__device__ uint16_t channel_mean(const float* x, uint32_t stride, uint32_t skip) {
  float partial[6];
  float sum = 0.0f;
  uint32_t n = 0;
#pragma unroll
  for (uint32_t k = 0; k < QKV_TILE; k++) {
    const uint32_t t = __brev(k) >> 26;
    float v = x[t * stride];
    bool counts = t >= skip && (bits_of(v) & 0x7fffffff) < bits_of(kInfinity);
    n += counts;
    v = counts ? v : 0.0f;
#pragma unroll
    for (uint32_t level = 0; level < 6; level++) {
      if ((k >> level & 1) == 0) {
        partial[level] = v;
        break;
      }
      v = add(partial[level], v);
    }
    if (k == QKV_TILE - 1) sum = v;
  }
  float mean = n ? quotient(sum, (float)n) : 0.0f;
  mean = mean > kLimit ? kLimit : mean;
  return float_to_half(mean < -kLimit ? -kLimit : mean);
}

// Page of a block and this operand's head.
__device__ __forceinline__ uint8_t* page_of(const QkvAppend& p, const Operand& o, uint64_t block) {
  return (uint8_t*)p.pages + (block * p.heads + o.head) * p.page_bytes;
}

// New tokens that stay exact: sink rows, and window rows behind the closed tiles.
__device__ uint32_t write_exact(const QkvAppend& p, const Operand& o, const QkvSequence& s) {
  const uint32_t quads = o.at.dim / 4;
  const int32_t sinks = min((int32_t)p.sinks, s.new_len), first = max(max(s.new_packed, s.old_len), (int32_t)p.sinks);
  const uint32_t to_sinks = max(sinks - s.old_len, 0), all = to_sinks + max(s.new_len - first, 0);
  uint32_t clamped = 0;
  for (uint32_t i = threadIdx.x; i < all * quads; i += blockDim.x) {
    uint32_t row = i / quads, channel = i % quads * 4;
    bool sink = row < to_sinks;
    int32_t t = sink ? s.old_len + (int32_t)row : first + (int32_t)(row - to_sinks);
    float x[4];
    load4(o.input, o.vectors, row_offset(o.input, s.first_row + (t - s.old_len), o.head), channel, x);
    uint16_t* rows = sink ? exact_rows(p, p.sink[o.op], p.sinks, o, s.seat) + (uint64_t)t * o.at.dim
                          : exact_rows(p, p.window[o.op], p.window_rows, o, s.seat) + (uint64_t)(t % p.window_rows) * o.at.dim;
    *(uint2*)(rows + channel) = exact4(p.window_dtype, x, clamped);
  }
  return clamped;
}

// Whether centred keys close tile 0 in this step. Its mean then reaches the other tiles of the sequence through the one block that
// closes them all.
__device__ __forceinline__ bool one_block_closes(const QkvAppend& p, const QkvSequence& s) {
  return p.format[0].center && s.old_packed == 0 && s.new_packed > 0;
}

// The first tile made of new tokens only.
__device__ __forceinline__ int32_t first_new_tile(const QkvSequence& s) {
  return max((uint32_t)s.old_packed / QKV_TILE, ((uint32_t)s.old_len + QKV_TILE - 1) / QKV_TILE);
}

// What a block of threads does: tiles `tile .. end` of sequence `index`, then its exact rows; or, in direct mode, rows from `first`.
struct Job {
  QkvSequence s;
  uint32_t index;
  int32_t tile, end;
  bool exact;
  // Rows of the unit, and its first row of the input in direct mode.
  uint32_t rows, first;
  int64_t slots[kRows];
};

// Whether the rows of a sequence are in this layer's tensors: `begin_step` was told how many rows its own batch has.
__device__ __forceinline__ bool has_rows(const QkvAppend& p, const QkvSequence& s) {
  return s.first_row >= 0 && s.tokens >= 0 && (uint32_t)s.first_row + (uint32_t)s.tokens <= p.rows;
}

__device__ void window_job(const QkvAppend& p, uint32_t op, uint32_t head, uint32_t index, Job& job) {
  if (threadIdx.x < sizeof(QkvSequence) / 4) {
    ((int32_t*)&job.s)[threadIdx.x] = ((const int32_t*)p.step)[index * (sizeof(QkvSequence) / 4) + threadIdx.x];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const QkvSequence& s = job.s;
  if (!has_rows(p, s)) {
    job.s.tokens = 0;
    if (op == 0 && head == 0) atomicAdd(&((QkvStatus*)p.status)->bad_rows, 1);
  }
  job.index = index;
  job.tile = s.old_packed / QKV_TILE;
  job.end = s.new_packed / QKV_TILE;
  if (!(op == 0 && one_block_closes(p, s))) job.end = min(first_new_tile(s), job.end);
  if (s.tokens == 0) job.end = job.tile;
  job.exact = s.tokens > 0;
  job.rows = QKV_TILE;
}

// The tile of new tokens whose first row is one of the 64 from 64 j on, if there is one.
__device__ void new_tile_job(const QkvAppend& p, uint32_t op, uint32_t j, Job& job) {
  if (threadIdx.x == 0) {
    job.tile = job.end = 0;
    job.exact = false;
    job.rows = QKV_TILE;
  }
  __syncthreads();
  const QkvSequence* step = (const QkvSequence*)p.step;
  for (uint32_t i = threadIdx.x; i < p.sequences; i += blockDim.x) {
    const QkvSequence s = step[i];
    if (s.tokens < QKV_TILE || !has_rows(p, s) || (op == 0 && one_block_closes(p, s))) continue;
    int32_t first = first_new_tile(s), row = s.first_row + first * QKV_TILE - s.old_len;
    int32_t ahead = max(0, ((int32_t)(j * QKV_TILE) - row + QKV_TILE - 1) / QKV_TILE);
    row += ahead * QKV_TILE;
    if (row >= (int32_t)((j + 1) * QKV_TILE) || (first + ahead + 1) * QKV_TILE > s.new_packed) continue;
    job.s = s;
    job.index = i;
    job.tile = first + ahead;
    job.end = job.tile + 1;
  }
}

__device__ void direct_job(const QkvAppend& p, bool report, uint32_t j, Job& job) {
  const uint32_t first = j * kRows, rows = min(kRows, p.rows - first);
  if (threadIdx.x < kRows) {
    int64_t slot = threadIdx.x < rows ? ((const int64_t*)p.slots)[first + threadIdx.x] : -1;
    // `begin_step` knew a number of blocks; these are the ones of this layer.
    if (slot >= (int64_t)p.blocks * QKV_TILE) {
      slot = -1;
      if (report) atomicAdd(&((QkvStatus*)p.status)->bad_slots, 1);
    }
    job.slots[threadIdx.x] = slot;
  }
  if (threadIdx.x != 0) return;
  job.first = first;
  job.rows = rows;
  job.tile = 0;
  job.end = 1;
  job.exact = false;
}

// New rows as f32; those without a slot are 0.
__device__ void load_rows(const QkvAppend& p, const Operand& o, const Job& job) {
  const uint32_t quads = o.at.dim / 4;
  for (uint32_t i = threadIdx.x; i < job.rows * quads; i += blockDim.x) {
    uint32_t row = i / quads, channel = i % quads * 4;
    float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (job.slots[row] >= 0) load4(o.input, o.vectors, row_offset(o.input, job.first + row, o.head), channel, x);
    *(float4*)(o.x + row * o.stride + channel) = make_float4(x[0], x[1], x[2], x[3]);
  }
}

__device__ void scatter_rows(const QkvAppend& p, const Operand& o, const Job& job) {
  const uint32_t groups = o.at.pair_count / QKV_TILE;
  for (uint32_t row = threadIdx.x / 32; row < job.rows; row += blockDim.x / 32) {
    const int64_t slot = job.slots[row];
    if (slot < 0) continue;
    scatter_token(o.format, o.at, slot % QKV_TILE, o.codes + row * o.code_stride, o.pairs + row * groups,
                  page_of(p, o, slot / QKV_TILE), threadIdx.x % 32, 32);
  }
}

// Block of a tile. `begin_step` saw that it exists; a table that changed since must not lead outside the pool.
__device__ int32_t block_of(const QkvAppend& p, const Job& job, int32_t tile) {
  if ((uint32_t)tile < p.table_width) {
    const int32_t block = ((const int32_t*)p.block_tables)[(uint64_t)job.index * p.table_width + tile];
    if ((uint32_t)block < p.blocks) return block;
  }
  if (threadIdx.x == 0) atomicAdd(&((QkvStatus*)p.status)->missing_blocks, 1);
  return -1;
}

// The mean that keys are centred on, made when tile 0 closes.
__device__ uint16_t* key_mean(const QkvAppend& p, const Operand& o, const Job& job, int32_t tile, uint32_t skip) {
  if (o.op != 0 || !o.format.center || !p.means) return nullptr;
  uint16_t* mean = (uint16_t*)p.means + ((uint64_t)job.s.seat * p.heads + o.head) * o.at.dim;
  if (tile == 0) {
    for (uint32_t c = threadIdx.x; c < o.at.dim; c += blockDim.x) mean[c] = channel_mean(o.x + c, o.stride, skip);
    __syncthreads();
  }
  return mean;
}

}  // namespace qkv

extern "C" __global__ void __launch_bounds__(128) qkv_append(const __grid_constant__ QkvAppend p) {
  using namespace qkv;
  extern __shared__ __align__(16) uint8_t shared[];
  __shared__ Job job;
  const uint32_t op = blockIdx.x & 1, head = (blockIdx.x >> 1) % p.heads, j = (blockIdx.x >> 1) / p.heads;
  if (p.direct) {
    direct_job(p, op == 0 && head == 0, j, job);
  } else if (j < p.sequences) {
    window_job(p, op, head, j, job);
  } else {
    new_tile_job(p, op, j - p.sequences, job);
  }
  __syncthreads();
  const Operand o(p, op, head, shared);
  uint32_t clamped = 0;
  for (int32_t tile = job.tile; tile < job.end; tile++) {
    const int32_t block = p.direct ? 0 : block_of(p, job, tile);
    if (block < 0) continue;
    const uint32_t skip = p.direct || tile > 0 ? 0 : p.sinks;
    if (p.direct) {
      load_rows(p, o, job);
    } else {
      clamped += gather(p, o, job.s, tile);
    }
    __syncthreads();
    const uint16_t* mean = p.direct ? nullptr : key_mean(p, o, job, tile, skip);
    const Unit u = {o.x, o.stride, job.rows, o.at.dim, skip};
    clamped += encode_tile(o.format, u, mean, o.scale, o.codes, o.code_stride, o.pairs);
    __syncthreads();
    if (p.direct) {
      scatter_rows(p, o, job);
    } else if (is_half(o.format.kind)) {
      write_fragment_halves(o.format, o.at, (const uint16_t*)o.codes, o.code_stride / 2, page_of(p, o, block));
    } else {
      write_fragment(o.format, o.at, o.codes, o.code_stride, o.pairs, page_of(p, o, block));
    }
    __syncthreads();
  }
  if (job.exact) clamped += write_exact(p, o, job.s);
  clamped = __reduce_add_sync(0xffffffff, clamped);
  if (clamped && threadIdx.x % 32 == 0) {
    atomicAdd((unsigned long long*)&((QkvStatus*)p.status)->clamped, (unsigned long long)clamped);
  }
}
