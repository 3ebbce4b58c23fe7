// f16, bf16, packed bytes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// out[i] = a[i] * b[i] + c[i] in f16 (one rounding), out[n + i] = max(a[i], b[i]) - c[i]. Blocks of any size.
extern "C" __global__ void half_arithmetic(const __half* a, const __half* b, const __half* c, __half* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = __hfma(a[i], b[i], c[i]);
    out[n + i] = __hsub(__hmax(a[i], b[i]), c[i]);
}

// The same on pairs of bf16.
extern "C" __global__ void bf16_pairs(const __nv_bfloat162* a, const __nv_bfloat162* b, const __nv_bfloat162* c,
                                      __nv_bfloat162* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = __hfma2(a[i], b[i], c[i]);
    out[n + i] = __hsub2(__hmax2(a[i], b[i]), c[i]);
}

// out = x as f16, rounded to nearest even, two at a time, then back to f32. n is even.
extern "C" __global__ void through_half(const float2* x, float2* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n / 2) out[i] = __half22float2(__float22half2_rn(x[i]));
}

// out[i] = dot product of four signed bytes of a[i] and b[i], plus i.
extern "C" __global__ void dot_bytes(const int* a, const int* b, int* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __dp4a(a[i], b[i], i);
}
