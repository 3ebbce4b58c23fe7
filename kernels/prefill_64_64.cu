// Heads of up to 64 channels of keys and 64 of values.
#include "prefill.cuh"

QKV_PREFILL(64, 64, 3)
