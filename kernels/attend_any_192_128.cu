// Any pair of formats, up to 8 columns, keys of 192 channels and values of 128.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_any_192_128, 3, 35168, qkv::Any<192, 128>)
