// Joins the partial results of units that several blocks of an attend launch share. A block has a unit; where only one block of the
// launch had it, there is nothing to do. A warp has a column at a time.
#include "attend/merge.cuh"

extern "C" __global__ void __launch_bounds__(128, 4) qkv_combine(const __grid_constant__ QkvAttend p) {
  using namespace qkv;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = p.at[1].dim;
  // The grid has the column blocks of the most tokens for every sequence.
  const uint32_t most_units = p.heads * p.column_blocks, sequence = blockIdx.x / most_units, index = blockIdx.x % most_units;
  const QkvSequence s = sequence_of(p, sequence);
  const uint64_t weight = unit_weight(p, s);
  if (weight == 0 || !served(p, s) || index >= units_of_sequence(p, s)) return;
  const Unit u = unit_of(p, s, sequence, index);
  const Items items = items_of(p, s);
  if (p.split && weight == 1) return;
  const uint64_t total = total_weight(p, lane), begin = begin_of(p, lane, sequence) + index * weight;
  const uint32_t first = block_of(p, total, begin);
  const uint32_t last = block_of(p, total, begin + weight_before(p, items, items.count() - 1));
  if (!p.split && first == last) return;

  // Calls `f` with the partial results of the unit, in order: those of its chunks, or of each block that had items of it.
  auto each = [&](auto f) {
    if (p.split) {
      for (uint64_t c = begin; c < min(begin + weight, (uint64_t)p.places); c++) f((const float*)partial(p, c));
      return;
    }
    for (uint32_t c = first; c <= last; c++) {
      const uint64_t from = block_begin(p, total, c), to = block_begin(p, total, c + 1);
      int32_t begins = from > begin ? item_at(p, items, from - begin) : 0;
      int32_t ends = to - begin >= weight ? items.count() : item_at(p, items, to - begin);
      if (begins < ends) f((const float*)partial(p, 2 * (uint64_t)c + (begins > 0 ? 0 : 1)));
    }
  };
  for (uint32_t c = warp; c < (uint32_t)u.columns; c += kWarps) {
    float most = kNoReference, sum = 0;
    each([&](const float* part) { most = fmaxf(most, part[c]); });
    each([&](const float* part) { sum += part[p.columns + c] * exp2_fast(part[c] - most); });
    const RowPlace at(p, u, c);
    const Row row(p, at.head, most, sum);
    for (uint32_t d = lane; d < dim; d += 32) {
      float x = 0;
      each([&](const float* part) { x += part[2 * p.columns + c * dim + d] * exp2_fast(part[c] - most); });
      store_output(p, at, d, row.factor == 0 ? 0.0f : x * row.factor);
    }
    if (lane == 0) store_lse(p, at, row.lse);
  }
}
