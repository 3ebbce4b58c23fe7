// Kernels whose blocks wait for each other: they need a cooperative launch.
#include <cooperative_groups.h>

// Rounds of Jacobi smoothing of x[0..n] with fixed ends: x[i] = (x[i - 1] + x[i + 1]) / 2, `rounds` times, between
// a and b; the result is in a if rounds is even. All threads of the grid together have at least n threads.
// The barrier is a counter that only grows: 0 before the launch.
extern "C" __global__ void jacobi(float* a, float* b, unsigned* arrived, int n, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    for (int round = 0; round < rounds; round++) {
        float *from = round % 2 ? b : a, *to = round % 2 ? a : b;
        if (i < n) {
            bool inner = i > 0 && i < n - 1;
            to[i] = inner ? 0.5f * (((volatile float*)from)[i - 1] + ((volatile float*)from)[i + 1]) : from[i];
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(arrived, 1u);
            while (*(volatile unsigned*)arrived < (round + 1) * gridDim.x) {}
            __threadfence();
        }
        __syncthreads();
    }
}

// out[i] = sum of x over all threads of the grid, by cooperative groups: x[i] are added into *sum (0 before), all
// wait, and everybody reads it.
extern "C" __global__ void grid_sum(const int* x, int* sum, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(sum, x[i]);
    cooperative_groups::this_grid().sync();
    out[i] = *(volatile int*)sum;
}
