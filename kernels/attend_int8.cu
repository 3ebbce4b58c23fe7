// 8 bits, one pair a token.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_int8_integer_64, 4, 11632, qkv::Integer<qkv::Token<8, 64>, qkv::Token<8, 64>, 64>)
QKV_ATTEND(qkv_attend_int8_integer_128, QKV_FEWER(4), 21360, qkv::Integer<qkv::Token<8, 128>, qkv::Token<8, 128>, 128>)
QKV_ATTEND(qkv_attend_int8_half_64, 3, 14176, qkv::Half<qkv::Token<8, 64>, qkv::Token<8, 64>, 64>)
QKV_ATTEND(qkv_attend_int8_half_128, QKV_FEWER(3), 26720, qkv::Half<qkv::Token<8, 128>, qkv::Token<8, 128>, 128>)
QKV_ATTEND(qkv_attend_int8_wide_64, QKV_FEWER(3), 18688, qkv::Half<qkv::Token<8, 64>, qkv::Token<8, 64>, 64, 2>)
QKV_ATTEND(qkv_attend_int8_wide_128, 2, 35584, qkv::Half<qkv::Token<8, 128>, qkv::Token<8, 128>, 128, 2>)
