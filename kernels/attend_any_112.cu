// Any pair of formats, heads of 112 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_any_112, 2, 24864, qkv::Any<112, 112>)
QKV_ATTEND(qkv_attend_any_wide_112, 2, 33216, qkv::Any<112, 112, 2>)
