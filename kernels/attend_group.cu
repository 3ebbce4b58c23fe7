// 8 bits, groups of 32 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_group8_integer_128, 3, 21360, qkv::Integer<qkv::Token<8, 32>, qkv::Token<8, 32>, 128>)
QKV_ATTEND(qkv_attend_group8_half_128, QKV_FEWER(3), 26720, qkv::Half<qkv::Token<8, 32>, qkv::Token<8, 32>, 128>)
