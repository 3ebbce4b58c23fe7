// Any pair of formats, up to 8 columns, heads of 256 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_any_256, 3, 47712, qkv::Any<256, 256>)
