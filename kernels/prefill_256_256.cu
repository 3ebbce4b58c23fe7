// Heads of up to 256 channels of keys and 256 of values.
#include "prefill.cuh"

QKV_PREFILL(256, 256, 2)
