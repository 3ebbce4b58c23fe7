// 8 bits, one pair a token.
#include "attend/instance.cuh"

QKV_ATTEND(qkv_attend_int8_integer_64, 3, 20832, qkv::Integer<qkv::Token<8, 64>, qkv::Token<8, 64>, 64>)
QKV_ATTEND(qkv_attend_int8_integer_128, 3, 24416, qkv::Integer<qkv::Token<8, 128>, qkv::Token<8, 128>, 128>)
QKV_ATTEND(qkv_attend_int8_half_64, 3, 21024, qkv::Half<qkv::Token<8, 64>, qkv::Token<8, 64>, 64>)
QKV_ATTEND(qkv_attend_int8_half_128, 2, 25376, qkv::Half<qkv::Token<8, 128>, qkv::Token<8, 128>, 128>)
