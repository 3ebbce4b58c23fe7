// Any pair of formats, up to 8 columns, heads of 80 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_any_80, 3, 24032, qkv::Any<80, 80>)
QKV_ATTEND(qkv_attend_any_wide_80, 2, 30208, qkv::Any<80, 80, 2>)
