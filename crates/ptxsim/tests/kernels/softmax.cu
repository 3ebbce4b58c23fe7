// out = softmax of each row of x, by running maximum and sum: one pass over the row, then one that writes.
//   m' = max(m, x), s' = s * exp(m - m') + exp(x - m')
// A warp a row, blocks of 128 threads (4 rows), grid rows / 4 rounded up. Lanes merge their (m, s) by shuffles.
#include <math_constants.h>

extern "C" __global__ void softmax(const float* x, float* out, int rows, int cols) {
    int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    const float* in = x + (size_t)row * cols;
    float m = -CUDART_INF_F, s = 0;
    for (int c = lane; c < cols; c += 32) {
        float larger = fmaxf(m, in[c]);
        s = s * expf(m - larger) + expf(in[c] - larger);
        m = larger;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        float m2 = __shfl_xor_sync(0xffffffffu, m, offset), s2 = __shfl_xor_sync(0xffffffffu, s, offset);
        float larger = fmaxf(m, m2);
        // a lane without elements has m = -inf: keep exp(-inf - -inf) out
        float a = m == -CUDART_INF_F ? 0 : expf(m - larger), b = m2 == -CUDART_INF_F ? 0 : expf(m2 - larger);
        s = s * a + s2 * b;
        m = larger;
    }
    for (int c = lane; c < cols; c += 32) out[(size_t)row * cols + c] = expf(in[c] - m) / s;
}
