// Pages of f16.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_f16_half_64, 3, 14176, qkv::Half<qkv::HalfFloat, qkv::HalfFloat, 64>)
QKV_ATTEND(qkv_attend_f16_half_128, 3, 26720, qkv::Half<qkv::HalfFloat, qkv::HalfFloat, 128>)
QKV_ATTEND(qkv_attend_f16_wide_64, 3, 18688, qkv::Half<qkv::HalfFloat, qkv::HalfFloat, 64, 2>)
QKV_ATTEND(qkv_attend_f16_wide_128, 2, 35584, qkv::Half<qkv::HalfFloat, qkv::HalfFloat, 128, 2>)
