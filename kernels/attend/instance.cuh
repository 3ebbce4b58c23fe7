// One attention kernel: `blocks` of 128 threads fit a multiprocessor, `bytes` of shared memory are what the launch gives.
#pragma once
#include "half_path.cuh"
#include "integer_path.cuh"

// `n` blocks; on Blackwell, whose code needs more registers, one fewer (`FEWER_ON_BLACKWELL` in src/cuda/launch/instances.rs).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define QKV_FEWER(n) (n - 1)
#else
#define QKV_FEWER(n) n
#endif

#define QKV_ATTEND(name, blocks, bytes, ...)                                                            \
  static_assert(sizeof(qkv::Shared<__VA_ARGS__>) == bytes, "src/cuda/launch/instances.rs");             \
  extern "C" __global__ void __launch_bounds__(128, blocks) name(const __grid_constant__ QkvAttend p) { \
    qkv::attend<__VA_ARGS__>(p);                                                                        \
  }

namespace qkv {

template <int Bits, int Group>
using Token = Coding<QKV_KIND_AFFINE, Bits, false, Group>;
template <int Bits, int Group>
using Channel = Coding<QKV_KIND_AFFINE, Bits, true, Group>;
using HalfFloat = Coding<QKV_KIND_F16, 16, false, 0>;
using E4m3 = Coding<QKV_KIND_E4M3, 8, false, 0>;

// Both operands of D channels; 8 NT columns on the f16 path.
template <class K, class V, int D, int NT = 1>
using Half = HalfPath<KeysOf<K>, ValuesOf<V>, D, D, NT>;
template <class K, class V, int D>
using Integer = IntegerPath<K, V, D, D>;
template <int DK, int DV, int NT = 1>
using Any = HalfPath<AnyKeys, AnyValues, DK, DV, NT>;

}  // namespace qkv
