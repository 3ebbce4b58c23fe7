// Any pair of formats, up to 8 columns, heads of 128 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_any_128, 2, 25376, qkv::Any<128, 128>)
