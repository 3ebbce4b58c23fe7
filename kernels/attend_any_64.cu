// Any pair of formats, up to 8 columns, heads of 64 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_any_64, 2, 21024, qkv::Any<64, 64>)
