// Heads of up to 128 channels of keys and 128 of values.
#include "prefill.cuh"

QKV_PREFILL(128, 128, 2)
