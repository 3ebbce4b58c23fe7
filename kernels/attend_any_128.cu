// Any pair of formats, heads of 128 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_any_128, 3, 30816, qkv::Any<128, 128>)
QKV_ATTEND(qkv_attend_any_wide_128, 2, 43776, qkv::Any<128, 128, 2>)
