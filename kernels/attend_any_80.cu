// Any pair of formats, heads of 80 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_any_80, 2, 22688, qkv::Any<80, 80>)
QKV_ATTEND(qkv_attend_any_wide_80, 2, 28864, qkv::Any<80, 80, 2>)
