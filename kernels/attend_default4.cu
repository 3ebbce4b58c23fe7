// 4 bits: keys per channel in groups of 64 tokens, values per token in groups of 64 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_default4_integer_64, 4, 15728, qkv::Integer<qkv::Channel<4, 64>, qkv::Token<4, 64>, 64>)
QKV_ATTEND(qkv_attend_default4_integer_128, 3, 30064, qkv::Integer<qkv::Channel<4, 64>, qkv::Token<4, 64>, 128>)
QKV_ATTEND(qkv_attend_default4_half_64, 3, 14176, qkv::Half<qkv::Channel<4, 64>, qkv::Token<4, 64>, 64>)
QKV_ATTEND(qkv_attend_default4_half_128, QKV_FEWER(3), 26720, qkv::Half<qkv::Channel<4, 64>, qkv::Token<4, 64>, 128>)
QKV_ATTEND(qkv_attend_default4_wide_64, QKV_FEWER(3), 18688, qkv::Half<qkv::Channel<4, 64>, qkv::Token<4, 64>, 64, 2>)
QKV_ATTEND(qkv_attend_default4_wide_128, 2, 35584, qkv::Half<qkv::Channel<4, 64>, qkv::Token<4, 64>, 128, 2>)
