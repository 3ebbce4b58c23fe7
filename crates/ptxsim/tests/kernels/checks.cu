// For every check a kernel that must trip it (bad_…) and its correct twin (good_…) that must not. One block each; the
// comment says of how many threads. Where twins compute something, both are meant to compute it.

__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// A read of shared memory that the compiler neither moves nor leaves out. (A volatile one would be a strong access,
// which is no data race.)
__device__ int load(const int* p) {
    int value;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(shared_address(p)) : "memory");
    return value;
}

// Out of bounds, use after free, misaligned ------------------------------------------------------------------------

// out[i] = x[i]: x and out of n. 64 threads; the bad one also reads x[n].
extern "C" __global__ void bad_past_end(const int* x, int* out, int n) {
    for (int i = threadIdx.x; i <= n; i += 64) {
        int value = ((const volatile int*)x)[i];
        if (i < n) out[i] = value;
    }
}

extern "C" __global__ void good_past_end(const int* x, int* out, int n) {
    for (int i = threadIdx.x; i < n; i += 64) out[i] = x[i];
}

// Stores n at x[i]: run it on freed memory, a null pointer, the gap between allocations. 1 thread.
extern "C" __global__ void store_at(int* x, long long i, int n) { x[i] = n; }

// out[0] = sum of four floats from x + 1 and from x + 4. 1 thread, x and out of 256-byte alignment.
extern "C" __global__ void bad_misaligned(const float* x, float* out) {
    float4 v = *(const float4*)(x + 1);
    out[0] = v.x + v.y + v.z + v.w;
}

extern "C" __global__ void good_misaligned(const float* x, float* out) {
    float4 v = *(const float4*)(x + 4);
    out[0] = v.x + v.y + v.z + v.w;
}

// out[t] = t by shared memory of 4 * n bytes given at launch. n threads; the bad one is one word off at the end.
extern "C" __global__ void bad_shared_end(int* out) {
    extern __shared__ int words[];
    words[threadIdx.x + 1] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = words[threadIdx.x + 1];
}

extern "C" __global__ void good_shared_end(int* out) {
    extern __shared__ int words[];
    words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = words[threadIdx.x];
}

// out[t] = i * i for i = *index + t, from a local array of 8. 1 thread; bad with *index = 4096, good with 7.
extern "C" __global__ void local_array_at(const int* index, int* out) {
    volatile int squares[8];
    for (int i = 0; i < 8; i++) squares[i] = i * i;
    out[threadIdx.x] = squares[*index + threadIdx.x];
}

// Memory that was never written ------------------------------------------------------------------------------------

// out[t] = x[t]. 32 threads; bad with fresh x, good with written x.
extern "C" __global__ void copy(const int* x, int* out) { out[threadIdx.x] = x[threadIdx.x]; }

// Only the first 16 words are written; the bad one copies 32 of them. 32 threads.
extern "C" __global__ void bad_uninitialized_shared(int* out) {
    __shared__ int words[32];
    if (threadIdx.x < 16) words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = load(&words[threadIdx.x]);
}

extern "C" __global__ void good_uninitialized_shared(int* out) {
    __shared__ int words[32];
    if (threadIdx.x < 16) words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x < 16) out[threadIdx.x] = load(&words[threadIdx.x]);
}

// Reads never-written words too, but uses only the written ones: wrong when every read counts, right when uses do.
// 32 threads.
extern "C" __global__ void masked_uninitialized_shared(int* out) {
    __shared__ int words[32];
    if (threadIdx.x < 16) words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    int value = load(&words[threadIdx.x]);
    out[threadIdx.x] = threadIdx.x < 16 ? value : -1;
}

// Races --------------------------------------------------------------------------------------------------------------

// out[t] = 63 - t through shared memory: between the two warps nothing orders write and read. 64 threads.
extern "C" __global__ void bad_missing_barrier(int* out) {
    __shared__ int words[64];
    words[threadIdx.x] = 0;
    __syncthreads();
    words[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = load(&words[63 - threadIdx.x]);
}

extern "C" __global__ void good_missing_barrier(int* out) {
    __shared__ int words[64];
    words[threadIdx.x] = 0;
    __syncthreads();
    words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = load(&words[63 - threadIdx.x]);
}

// The second round overwrites what a slower warp may still read. 64 threads; out[t] = 63 - t + 1.
extern "C" __global__ void bad_write_after_read(int* out) {
    __shared__ int words[64];
    int sum = 0;
    for (int round = 0; round < 2; round++) {
        words[threadIdx.x] = threadIdx.x * round + 1 - round;
        __syncthreads();
        sum += load(&words[63 - threadIdx.x]);
    }
    out[threadIdx.x] = sum;
}

extern "C" __global__ void good_write_after_read(int* out) {
    __shared__ int words[64];
    int sum = 0;
    for (int round = 0; round < 2; round++) {
        words[threadIdx.x] = threadIdx.x * round + 1 - round;
        __syncthreads();
        sum += load(&words[63 - threadIdx.x]);
        __syncthreads();
    }
    out[threadIdx.x] = sum;
}

// One lane of the second warp writes the word that the first warp reads. 64 threads; out[t] = 1 or 2.
extern "C" __global__ void bad_one_lane(int* out) {
    __shared__ int words[2];
    if (threadIdx.x == 0) words[0] = 1, words[1] = 2;
    __syncthreads();
    if (threadIdx.x == 40) words[0] = 2;
    out[threadIdx.x] = load(&words[threadIdx.x / 32]);
}

extern "C" __global__ void good_one_lane(int* out) {
    __shared__ int words[2];
    if (threadIdx.x == 0) words[0] = 1, words[1] = 2;
    __syncthreads();
    if (threadIdx.x == 40) words[1] = 2;
    out[threadIdx.x] = threadIdx.x < 32 ? load(&words[0]) : 2;
}

// out[t] = 31 - t between the lanes of one warp, without and with a warp-level barrier. 32 threads.
extern "C" __global__ void bad_warp_race(int* out) {
    __shared__ int words[32];
    words[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = load(&words[31 - threadIdx.x]);
}

extern "C" __global__ void good_warp_race(int* out) {
    __shared__ int words[32];
    words[threadIdx.x] = threadIdx.x;
    __syncwarp();
    out[threadIdx.x] = load(&words[31 - threadIdx.x]);
}

// Two lanes of one instruction store different values into one word. 32 threads; the twin lets one lane store.
extern "C" __global__ void bad_same_word(int* out) {
    __shared__ int word;
    word = threadIdx.x;
    __syncwarp();
    out[threadIdx.x] = load(&word);
}

extern "C" __global__ void good_same_word(int* out) {
    __shared__ int word;
    if (threadIdx.x == 31) word = threadIdx.x;
    __syncwarp();
    out[threadIdx.x] = load(&word);
}

// All threads count by atomics: no race. 64 threads; out[t] = 64.
extern "C" __global__ void good_atomics(int* out) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);
    __syncthreads();
    out[threadIdx.x] = count;
}

// Asynchronous copies ------------------------------------------------------------------------------------------------

__device__ void copy4(int* to, const int* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// out[t] = x[t], through a copy that is never waited for; through one that is. 32 threads.
extern "C" __global__ void bad_missing_wait(const int* x, int* out) {
    __shared__ int words[32];
    copy4(&words[threadIdx.x], &x[threadIdx.x]);
    asm volatile("cp.async.commit_group;" ::: "memory");
    out[threadIdx.x] = load(&words[threadIdx.x]);
}

extern "C" __global__ void good_missing_wait(const int* x, int* out) {
    __shared__ int words[32];
    copy4(&words[threadIdx.x], &x[threadIdx.x]);
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    out[threadIdx.x] = load(&words[threadIdx.x]);
}

// Waits for all groups but one: that is the wrong number for the second of two. out[t] = x[t] + x[32 + t]. 32 threads.
extern "C" __global__ void bad_wait_count(const int* x, int* out) {
    __shared__ int words[2][32];
    for (int i = 0; i < 2; i++) {
        copy4(&words[i][threadIdx.x], &x[32 * i + threadIdx.x]);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    int sum = 0;
    for (int i = 0; i < 2; i++) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        sum += load(&words[i][threadIdx.x]);
    }
    out[threadIdx.x] = sum;
}

extern "C" __global__ void good_wait_count(const int* x, int* out) {
    __shared__ int words[2][32];
    for (int i = 0; i < 2; i++) {
        copy4(&words[i][threadIdx.x], &x[32 * i + threadIdx.x]);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    int sum = load(&words[0][threadIdx.x]);
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    out[threadIdx.x] = sum + load(&words[1][threadIdx.x]);
}

// The wait orders a thread's own copies only: other threads need a barrier after it. out[t] = x[63 - t]. 64 threads.
extern "C" __global__ void bad_wait_without_barrier(const int* x, int* out) {
    __shared__ int words[64];
    words[threadIdx.x] = 0;
    __syncthreads();
    copy4(&words[threadIdx.x], &x[threadIdx.x]);
    asm volatile("cp.async.wait_all;" ::: "memory");
    out[threadIdx.x] = load(&words[63 - threadIdx.x]);
}

extern "C" __global__ void good_wait_without_barrier(const int* x, int* out) {
    __shared__ int words[64];
    words[threadIdx.x] = 0;
    __syncthreads();
    copy4(&words[threadIdx.x], &x[threadIdx.x]);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    out[threadIdx.x] = load(&words[63 - threadIdx.x]);
}

// Barriers, shuffles, loops --------------------------------------------------------------------------------------------

// An aligned barrier that only the even lanes reach; that all reach. 32 threads; out[t] = 1 for even t, else 0.
extern "C" __global__ void bad_divergent_barrier(int* out) {
    int even = threadIdx.x % 2 == 0;
    if (even) {
        asm volatile("bar.sync 0;" ::: "memory");
        out[threadIdx.x] = 1;
    } else {
        out[threadIdx.x] = 0;
    }
}

extern "C" __global__ void good_divergent_barrier(int* out) {
    int even = threadIdx.x % 2 == 0;
    asm volatile("bar.sync 0;" ::: "memory");
    if (even) {
        out[threadIdx.x] = 1;
    } else {
        out[threadIdx.x] = 0;
    }
}

// Each warp waits for the other at another barrier, for ever; at one barrier. 64 threads; out[t] = t.
extern "C" __global__ void bad_deadlock(int* out) {
    if (threadIdx.x < 32) {
        asm volatile("bar.sync 1, 64;" ::: "memory");
    } else {
        asm volatile("bar.sync 2, 64;" ::: "memory");
    }
    out[threadIdx.x] = threadIdx.x;
}

extern "C" __global__ void good_deadlock(int* out) {
    if (threadIdx.x < 32) {
        asm volatile("bar.sync 1, 64;" ::: "memory");
    } else {
        asm volatile("bar.sync 1, 64;" ::: "memory");
    }
    out[threadIdx.x] = threadIdx.x;
}

// A warp that has ended does not hold up a barrier of the rest: 64 threads, out[t] = t for t < 32.
extern "C" __global__ void good_early_exit(int* out) {
    if (threadIdx.x >= 32) return;
    __syncthreads();
    out[threadIdx.x] = threadIdx.x;
}

// Loops until *flag changes: bad with *flag = 0, good with 1. 1 thread; *out = 1.
extern "C" __global__ void wait_for(const int* flag, int* out) {
    while (*(const volatile int*)flag == 0) {}
    *out = 1;
}

// Spins on a lock that another lane of the same warp holds: right, as each lane of a warp goes on in its own time.
// 32 threads, *lock = *count = 0 before; *count = 32 after.
extern "C" __global__ void good_warp_lock(int* lock, int* count) {
    while (atomicCAS(lock, 0, 1) != 0) {}
    __threadfence();
    *(volatile int*)count = *(volatile int*)count + 1;
    __threadfence();
    atomicExch(lock, 0);
}

// Half a warp shuffles from lane 20, which is not there; from lane 12. 32 threads; out[t] = 12 for t < 16.
extern "C" __global__ void bad_shuffle(int* out) {
    if (threadIdx.x < 16) {
        int value;
        asm volatile("shfl.sync.idx.b32 %0, %1, 20, 31, 0xffff;" : "=r"(value) : "r"(threadIdx.x));
        out[threadIdx.x] = value;
    }
}

extern "C" __global__ void good_shuffle(int* out) {
    if (threadIdx.x < 16) {
        int value;
        asm volatile("shfl.sync.idx.b32 %0, %1, 12, 31, 0xffff;" : "=r"(value) : "r"(threadIdx.x));
        out[threadIdx.x] = value;
    }
}

// A shuffle whose mask leaves out the lane itself. 32 threads.
extern "C" __global__ void bad_shuffle_mask(int* out) {
    int value;
    asm volatile("shfl.sync.idx.b32 %0, %1, 3, 31, 0xff;" : "=r"(value) : "r"(threadIdx.x));
    out[threadIdx.x] = value;
}

// trap in one thread. 32 threads.
extern "C" __global__ void bad_trap(int* out) {
    if (threadIdx.x == 7) asm volatile("trap;");
    out[threadIdx.x] = 1;
}
