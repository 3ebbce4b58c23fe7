// 2 bits: keys per channel in groups of 32 tokens, values per token in groups of 32 channels.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_default2_integer_64, 4, 15728, qkv::Integer<qkv::Channel<2, 32>, qkv::Token<2, 32>, 64>)
QKV_ATTEND(qkv_attend_default2_integer_128, QKV_FEWER(3), 30064, qkv::Integer<qkv::Channel<2, 32>, qkv::Token<2, 32>, 128>)
QKV_ATTEND(qkv_attend_default2_half_64, 3, 14176, qkv::Half<qkv::Channel<2, 32>, qkv::Token<2, 32>, 64>)
QKV_ATTEND(qkv_attend_default2_half_128, QKV_FEWER(3), 26720, qkv::Half<qkv::Channel<2, 32>, qkv::Token<2, 32>, 128>)
QKV_ATTEND(qkv_attend_default2_wide_64, 2, 18688, qkv::Half<qkv::Channel<2, 32>, qkv::Token<2, 32>, 64, 2>)
QKV_ATTEND(qkv_attend_default2_wide_128, 2, 35584, qkv::Half<qkv::Channel<2, 32>, qkv::Token<2, 32>, 128, 2>)
