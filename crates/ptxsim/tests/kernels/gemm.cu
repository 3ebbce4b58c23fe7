// C[m][n] = sum over k of A[m][k] * B[k][n]: f16 in, f32 out, row-major; m, n multiples of 64, k of 32.
//
// A block of 128 threads makes a 64 x 64 tile; warp w makes rows 16 w … 16 w + 15 of it. K goes in steps of 32 through
// three buffers that cp.async fills two steps ahead. Rows of A have 32 + 8 halves, rows of B 64 + 8, so that the eight
// 16-byte rows of an ldmatrix fall into different banks. Grid n/64 x m/64.
#include <cuda_fp16.h>

constexpr int STAGES = 3, TILE_M = 64, TILE_N = 64, TILE_K = 32, PITCH_A = TILE_K + 8, PITCH_B = TILE_N + 8;

__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}

extern "C" __global__ void __launch_bounds__(128) gemm(const __half* a, const __half* b, float* c, int m, int n, int k) {
    __shared__ __align__(16) __half tile_a[STAGES][TILE_M * PITCH_A];
    __shared__ __align__(16) __half tile_b[STAGES][TILE_K * PITCH_B];
    int t = threadIdx.x, warp = t / 32, lane = t % 32;
    int row0 = blockIdx.y * TILE_M, col0 = blockIdx.x * TILE_N, steps = k / TILE_K;

    auto load = [&](int step) {
        if (step < steps) {
            __half *sa = tile_a[step % STAGES], *sb = tile_b[step % STAGES];
            for (int i = t; i < TILE_M * TILE_K / 8; i += 128) {
                int r = i / (TILE_K / 8), q = i % (TILE_K / 8) * 8;
                copy16(sa + r * PITCH_A + q, a + (size_t)(row0 + r) * k + step * TILE_K + q);
            }
            for (int i = t; i < TILE_K * TILE_N / 8; i += 128) {
                int r = i / (TILE_N / 8), q = i % (TILE_N / 8) * 8;
                copy16(sb + r * PITCH_B + q, b + (size_t)(step * TILE_K + r) * n + col0 + q);
            }
        }
        // an empty group keeps the count of groups that wait_group sees right
        asm volatile("cp.async.commit_group;");
    };

    float acc[TILE_N / 8][4] = {};
    for (int s = 0; s < STAGES - 1; s++) load(s);
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads();
        load(step + STAGES - 1);
        const __half *sa = tile_a[step % STAGES], *sb = tile_b[step % STAGES];
        for (int kk = 0; kk < TILE_K; kk += 16) {
            unsigned fa[4], fb[2];
            // four 8 x 8 matrices of A: lane l gives the address of row l % 16, columns 8 * (l / 16) on
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(fa[0]), "=r"(fa[1]), "=r"(fa[2]), "=r"(fa[3])
                         : "r"(shared_address(sa + (warp * 16 + lane % 16) * PITCH_A + kk + lane / 16 * 8)));
            for (int j = 0; j < TILE_N / 8; j++) {
                asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                             : "=r"(fb[0]), "=r"(fb[1])
                             : "r"(shared_address(sb + (kk + lane % 16) * PITCH_B + j * 8)));
                asm volatile(
                    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                    "{%0, %1, %2, %3};"
                    : "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
                    : "r"(fa[0]), "r"(fa[1]), "r"(fa[2]), "r"(fa[3]), "r"(fb[0]), "r"(fb[1]));
            }
        }
    }
    for (int j = 0; j < TILE_N / 8; j++) {
        float* to = c + (size_t)(row0 + warp * 16 + lane / 4) * n + col0 + j * 8 + lane % 4 * 2;
        *(float2*)to = make_float2(acc[j][0], acc[j][1]);
        *(float2*)(to + (size_t)8 * n) = make_float2(acc[j][2], acc[j][3]);
    }
}
