// Any pair of formats, up to 8 columns, heads of 112 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_any_112, 3, 30304, qkv::Any<112, 112>)
