// Any pair of formats, up to 8 columns, heads of 64 channels.
#include "attend/half_path.cuh"

using Path = qkv::HalfPath<qkv::AnyKeys, qkv::AnyValues, 64, 64, 1>;
static_assert(sizeof(qkv::Shared<Path>) == 20832, "src/cuda/launch/attend.rs");

extern "C" __global__ void __launch_bounds__(128, 2) qkv_attend_any_64(const __grid_constant__ QkvAttend p) {
  qkv::attend<Path>(p);
}
