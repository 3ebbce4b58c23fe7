// Order between warps without barriers: flags, locks, tickets; with a mistake, and without.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;

// Warp 0 writes 32 words and raises a flag, warp 1 waits for it. out[i] = 31 - i.
__device__ void hand_over(int* out, bool fence) {
    __shared__ volatile int flag;
    __shared__ int data[32];
    int t = threadIdx.x;
    if (t == 0) flag = 0;
    __syncthreads();
    if (t < 32) {
        data[t] = t;
        if (fence) __threadfence_block();
        __syncwarp();
        if (t == 0) flag = 1;
    } else {
        while (!flag) {}
        if (fence) __threadfence_block();
        out[t - 32] = data[63 - t];
    }
}
extern "C" __global__ void good_flag(int* out) { hand_over(out, true); }
extern "C" __global__ void bad_flag(int* out) { hand_over(out, false); }

// The same with a flag in global memory, and with operations that are fences themselves.
extern "C" __global__ void good_global_flag(int* flag, int* out) {
    __shared__ int data[32];
    int t = threadIdx.x;
    if (t < 32) {
        data[t] = t;
        __syncwarp();
        if (t == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(flag) : "memory");
    } else {
        int seen;
        do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        while (!seen);
        out[t - 32] = data[63 - t];
    }
}

// Every warp adds its number plus one, five times, under a lock.
extern "C" __global__ void good_lock(int* out) {
    __shared__ int lock, sum;
    if (threadIdx.x == 0) lock = sum = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        for (int i = 0; i < 5; i++) {
            while (atomicCAS(&lock, 0, 1) != 0) {}
            __threadfence_block();
            sum += threadIdx.x / 32 + 1;
            __threadfence_block();
            atomicExch(&lock, 0);
        }
    __syncthreads();
    if (threadIdx.x == 0) *out = sum;
}

// The warp that comes last adds up what all have left. Without the fence nothing orders its reads.
__device__ void ticket(int* out, bool fence) {
    __shared__ int part[32];
    __shared__ unsigned done;
    if (threadIdx.x == 0) done = 0;
    __syncthreads();
    if (threadIdx.x % 32 != 0) return;
    part[threadIdx.x / 32] = threadIdx.x;
    if (fence) __threadfence_block();
    if (atomicAdd(&done, 1) != blockDim.x / 32 - 1) return;
    if (fence) __threadfence_block();
    int sum = 0;
    for (int w = 0; w < blockDim.x / 32; w++) sum += part[w];
    *out = sum;
}
extern "C" __global__ void good_ticket(int* out) { ticket(out, true); }
extern "C" __global__ void bad_ticket(int* out) { ticket(out, false); }

// A fence orders a lane's own accesses, not those of its neighbours.
extern "C" __global__ void bad_fence_in_warp(int* out) {
    __shared__ int data[32];
    data[threadIdx.x] = threadIdx.x;
    __threadfence_block();
    out[threadIdx.x] = data[31 - threadIdx.x];
}

// A strong write does not order a weak read of another warp.
extern "C" __global__ void bad_strong_and_weak(int* out) {
    __shared__ int word;
    if (threadIdx.x == 0) word = 0;
    __syncthreads();
    if (threadIdx.x == 32)
        asm volatile("st.relaxed.cta.shared.s32 [%0], 1;" ::"r"((unsigned)__cvta_generic_to_shared(&word)) : "memory");
    else if (threadIdx.x == 0)
        *out = word;
}

// All warps write the same: nobody can see in which order.
extern "C" __global__ void good_same_value(int* out) {
    __shared__ int any;
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    if (threadIdx.x % 32 < 3) any = 1;
    __syncthreads();
    out[threadIdx.x] = any;
}

// Tiles of two warps synchronise in shared memory that the system reserves.
extern "C" __global__ void good_tile(const int* x, int* out) {
    __shared__ int own[128];
    own[threadIdx.x] = 7;
    auto tile = cg::tiled_partition<64>(cg::this_thread_block());
    int sum = cg::reduce(tile, x[threadIdx.x], cg::plus<int>());
    tile.sync();
    out[threadIdx.x] = sum + own[threadIdx.x];
}

// Block i waits for block i - 1, or for block i + 1, and adds i.
__device__ void chain(volatile int* turn, int* out, int place, int before) {
    if (threadIdx.x != 0) return;
    while (*turn != place) {}
    __threadfence();
    out[blockIdx.x] = (place > 0 ? out[before] : 0) + blockIdx.x;
    __threadfence();
    *turn = place + 1;
}
extern "C" __global__ void good_chain(int* turn, int* out) { chain(turn, out, blockIdx.x, blockIdx.x - 1); }
extern "C" __global__ void good_chain_back(int* turn, int* out) {
    chain(turn, out, gridDim.x - 1 - blockIdx.x, blockIdx.x + 1);
}
