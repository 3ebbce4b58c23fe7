// 4, 2 and 1 bits, one pair a token.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_token4_integer_128, 4, 21360, qkv::Integer<qkv::Token<4, 128>, qkv::Token<4, 128>, 128>)
QKV_ATTEND(qkv_attend_token4_half_128, 3, 26720, qkv::Half<qkv::Token<4, 128>, qkv::Token<4, 128>, 128>)
QKV_ATTEND(qkv_attend_token4_wide_128, 2, 35584, qkv::Half<qkv::Token<4, 128>, qkv::Token<4, 128>, 128, 2>)
QKV_ATTEND(qkv_attend_token2_integer_128, 4, 21360, qkv::Integer<qkv::Token<2, 128>, qkv::Token<2, 128>, 128>)
QKV_ATTEND(qkv_attend_token2_half_128, 3, 26720, qkv::Half<qkv::Token<2, 128>, qkv::Token<2, 128>, 128>)
QKV_ATTEND(qkv_attend_token2_wide_128, 2, 35584, qkv::Half<qkv::Token<2, 128>, qkv::Token<2, 128>, 128, 2>)
QKV_ATTEND(qkv_attend_token1_integer_128, 4, 21360, qkv::Integer<qkv::Token<1, 128>, qkv::Token<1, 128>, 128>)
QKV_ATTEND(qkv_attend_token1_half_128, 3, 26720, qkv::Half<qkv::Token<1, 128>, qkv::Token<1, 128>, 128>)
QKV_ATTEND(qkv_attend_token1_wide_128, 2, 35584, qkv::Half<qkv::Token<1, 128>, qkv::Token<1, 128>, 128, 2>)
