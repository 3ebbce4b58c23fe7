// Any pair of formats, heads of 64 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_any_64, 3, 22368, qkv::Any<64, 64>)
QKV_ATTEND(qkv_attend_any_wide_64, 2, 26880, qkv::Any<64, 64, 2>)
