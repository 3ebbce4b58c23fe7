// Pages of E4M3, scales of any kind.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_e4m3_half_64, 3, 14176, qkv::Half<qkv::E4m3, qkv::E4m3, 64>)
QKV_ATTEND(qkv_attend_e4m3_half_128, QKV_FEWER(3), 26720, qkv::Half<qkv::E4m3, qkv::E4m3, 128>)
QKV_ATTEND(qkv_attend_e4m3_wide_64, 3, 18688, qkv::Half<qkv::E4m3, qkv::E4m3, 64, 2>)
QKV_ATTEND(qkv_attend_e4m3_wide_128, 2, 35584, qkv::Half<qkv::E4m3, qkv::E4m3, 128, 2>)
