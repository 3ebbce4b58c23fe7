// Kernels of the kinds that every program has. Each comment says what the kernel computes and how it is launched.

// out[i] = a[i] + b[i] for i < n. Any grid of 1-D blocks that covers n; n may end inside a block.
extern "C" __global__ void vector_add(const float* a, const float* b, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}

// As vector_add, four at a time with 16-byte accesses, the tail one by one. One block.
extern "C" __global__ void vector_add4(const float4* a, const float4* b, float4* out, int n) {
    for (int i = threadIdx.x; i < n / 4; i += blockDim.x) {
        float4 x = a[i], y = b[i];
        out[i] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
    int tail = n / 4 * 4 + threadIdx.x;
    if (tail < n) ((float*)out)[tail] = ((const float*)a)[tail] + ((const float*)b)[tail];
}

// out[block] = sum of the block's part of x: thread t of block b takes x[b * 256 + t], missing ones are 0.
// Blocks of 256 threads.
extern "C" __global__ void reduce_sum(const int* x, int* out, int n) {
    __shared__ int partial[8];
    int i = blockIdx.x * 256 + threadIdx.x;
    int sum = i < n ? x[i] : 0;
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < 8 ? partial[threadIdx.x] : 0;
        for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
        if (threadIdx.x == 0) out[blockIdx.x] = sum;
    }
}

// out = inclusive prefix sums of x[0..256]. One block of 256 threads.
extern "C" __global__ void scan(const int* x, int* out) {
    __shared__ int buffer[2][256];
    int t = threadIdx.x, from = 0;
    buffer[0][t] = x[t];
    __syncthreads();
    for (int offset = 1; offset < 256; offset *= 2) {
        int value = buffer[from][t];
        if (t >= offset) value += buffer[from][t - offset];
        buffer[1 - from][t] = value;
        from = 1 - from;
        __syncthreads();
    }
    out[t] = buffer[from][t];
}

// out[c][r] = x[r][c] for a rows x cols matrix, both multiples of 32. Blocks of 32 x 8, grid cols/32 x rows/32.
// Columns of the tile are read: 32 lanes hit one bank, so a warp's read takes 32 passes.
extern "C" __global__ void transpose(const float* x, float* out, int rows, int cols) {
    __shared__ float tile[32][32];
    int c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 32 + threadIdx.y;
    for (int i = 0; i < 32; i += 8) tile[threadIdx.y + i][threadIdx.x] = x[(r + i) * cols + c];
    __syncthreads();
    c = blockIdx.y * 32 + threadIdx.x;
    r = blockIdx.x * 32 + threadIdx.y;
    for (int i = 0; i < 32; i += 8) out[(r + i) * rows + c] = tile[threadIdx.x][threadIdx.y + i];
}

// The same with rows of 33: no bank conflict.
extern "C" __global__ void transpose_padded(const float* x, float* out, int rows, int cols) {
    __shared__ float tile[32][33];
    int c = blockIdx.x * 32 + threadIdx.x, r = blockIdx.y * 32 + threadIdx.y;
    for (int i = 0; i < 32; i += 8) tile[threadIdx.y + i][threadIdx.x] = x[(r + i) * cols + c];
    __syncthreads();
    c = blockIdx.y * 32 + threadIdx.x;
    r = blockIdx.x * 32 + threadIdx.y;
    for (int i = 0; i < 32; i += 8) out[(r + i) * rows + c] = tile[threadIdx.x][threadIdx.y + i];
}

// counts[b] += how many of x[0..n] are b, for b < 64. Any grid of 1-D blocks of at least 64 threads.
extern "C" __global__ void histogram(const unsigned char* x, unsigned* counts, int n) {
    __shared__ unsigned local[64];
    if (threadIdx.x < 64) local[threadIdx.x] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&local[x[i] % 64], 1u);
    __syncthreads();
    if (threadIdx.x < 64 && local[threadIdx.x]) atomicAdd(&counts[threadIdx.x], local[threadIdx.x]);
}

// *out = sum of x[0..n]; the last block to finish adds up what the others left in partial[grid].
// *ticket is 0 before and after. Blocks of 128 threads.
extern "C" __global__ void last_block_sum(const float* x, float* partial, unsigned* ticket, float* out, int n) {
    __shared__ float sums[128];
    __shared__ bool last;
    int t = threadIdx.x;
    float sum = 0;
    for (int i = blockIdx.x * 128 + t; i < n; i += gridDim.x * 128) sum += x[i];
    sums[t] = sum;
    __syncthreads();
    for (int half = 64; half > 0; half /= 2) {
        if (t < half) sums[t] += sums[t + half];
        __syncthreads();
    }
    if (t == 0) {
        partial[blockIdx.x] = sums[0];
        __threadfence();
        last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && t == 0) {
        __threadfence();
        float total = 0;
        for (unsigned b = 0; b < gridDim.x; b++) total += ((volatile float*)partial)[b];
        *out = total;
    }
}

// out[i] = x[n - 1 - i] through dynamic shared memory of 4 * n bytes. One block of n threads.
extern "C" __global__ void reverse(const int* x, int* out, int n) {
    extern __shared__ int words[];
    words[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = words[n - 1 - threadIdx.x];
}

__constant__ float coefficients[5] = {1.0f, -0.5f, 0.25f, -0.125f, 0.0625f};
__device__ int offsets[4] = {10, 20, 30, 40};

// out[i] = sum of coefficients[k] * x[i]^k by Horner's rule with fma, and offsets[i % 4] added last.
extern "C" __global__ void polynomial(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float y = coefficients[4];
    for (int k = 3; k >= 0; k--) y = fmaf(y, x[i], coefficients[k]);
    out[i] = y + offsets[i % 4];
}

__device__ __noinline__ int gcd(int a, int b) {
    while (b != 0) {
        int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

__device__ __noinline__ int factorial(int n) {
    return n <= 1 ? 1 : n * factorial(n - 1);
}

struct Pair {
    int first;
    short second;
};

__device__ __noinline__ Pair both(int a, short b) {
    Pair pair = {a + b, short(a - b)};
    return pair;
}

// out[i] = gcd(a[i], b[i]) + factorial(i % 8), and the parts of both(a[i], b[i]) added: calls, recursion, a struct.
extern "C" __global__ void calls(const int* a, const int* b, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Pair pair = both(a[i], short(b[i]));
    out[i] = gcd(a[i], b[i]) + factorial(i % 8) + pair.first + pair.second;
}

// out[i] = the i-th of x[0..16] in ascending order, sorted in local memory by every thread. One block, 16 threads.
extern "C" __global__ void local_sort(const int* x, int* out) {
    int all[16];
    for (int i = 0; i < 16; i++) all[i] = x[i];
#pragma unroll 1
    for (int i = 1; i < 16; i++) {
        int value = all[i], j = i;
#pragma unroll 1
        for (; j > 0 && all[j - 1] > value; j--) all[j] = all[j - 1];
        all[j] = value;
    }
    out[threadIdx.x] = all[threadIdx.x];
}

// out[i] by x[i] = 0 … 9: another operation on i for each; 0 for other x.
extern "C" __global__ void choose(const int* x, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int y;
    switch (x[i]) {
        case 0: y = i + 1; break;
        case 1: y = i * 3; break;
        case 2: y = i ^ 0x55; break;
        case 3: y = -i; break;
        case 4: y = i << 2; break;
        case 5: y = i >> 1; break;
        case 6: y = i * i; break;
        case 7: y = ~i; break;
        case 8: y = i % 7; break;
        case 9: y = i / 3; break;
        default: y = 0;
    }
    out[i] = y;
}

// The same by an indirect branch: nvcc itself seldom makes one. x[i] must be 0, 1 or 2: i + 1, 3 * i, i ^ 0x55.
extern "C" __global__ void branch_table(const unsigned* x, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int y;
    asm volatile(
        "{\n"
        ".reg .b32 t;\n"
        "ts: .branchtargets a, b, c;\n"
        "brx.idx %2, ts;\n"
        "a: add.s32 t, %1, 1; bra end;\n"
        "b: mul.lo.s32 t, %1, 3; bra end;\n"
        "c: xor.b32 t, %1, 0x55;\n"
        "end: mov.b32 %0, t;\n"
        "}" : "=r"(y) : "r"(i), "r"(x[i]));
    out[i] = y;
}

// 64-bit atomics on five words, by thread numbers g = 0 … threads - 1 of the whole grid:
// words[0] += g, [1] = max(g * 2^33), [2] ^= g << 40, [3] = a g that found 0 there (cas), [4] = some g (exch).
extern "C" __global__ void atomics64(unsigned long long* words) {
    unsigned long long g = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&words[0], g);
    atomicMax(&words[1], g << 33);
    atomicXor(&words[2], g << 40);
    atomicCAS(&words[3], 0ull, g);
    atomicExch(&words[4], g);
}
