// Heads of up to 192 channels of keys and 128 of values.
#include "prefill.cuh"

QKV_PREFILL(192, 128, 2)
