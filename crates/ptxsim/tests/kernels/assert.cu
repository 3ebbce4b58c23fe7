// assert: calls __assertfail with text, file, line and function in constant memory.
#include <cstdio>
#include <cassert>

// out[t] = x[t], and x[t] must not be negative.
extern "C" __global__ void checked_copy(const int* x, int* out) {
    assert(x[threadIdx.x] >= 0);
    out[threadIdx.x] = x[threadIdx.x];
}

// Conversions of C; the count is that of the arguments.
extern "C" __global__ void formats(int* count) {
    *count = printf("%d|%5d|%-5d|%05d|%+i|%lld|%zu|%hx|%X|%#x|%e|%g|%g|%8.3f|%*d|%.*f|%s|%.2s|%c|100%%\n", -7, 42, 42, -42, 8,
                    -5000000000LL, (size_t)7000000000ULL, 0x12345, 48879, 255, 12345.678, 0.1, 1e-7, 2.71828, 6, 5, 2, 3.14159,
                    "text", "text", 'Q');
}
