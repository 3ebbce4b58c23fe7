// Heads of up to 96 channels of keys and 96 of values.
#include "prefill.cuh"

QKV_PREFILL(96, 96, 3)
