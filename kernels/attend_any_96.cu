// Any pair of formats, up to 8 columns, heads of 96 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_any_96, 3, 24544, qkv::Any<96, 96>)
QKV_ATTEND(qkv_attend_any_wide_96, 2, 31232, qkv::Any<96, 96, 2>)
