// Clusters of two and four blocks, distributed shared memory (sm_90).

__device__ unsigned rank() {
    unsigned r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

__device__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Blocks of a pair exchange their 64 values through each other's shared memory: out of block b is x of block b ^ 1.
// Blocks of 64 threads, an even grid.
extern "C" __global__ void __cluster_dims__(2, 1, 1) exchange(const int* x, int* out) {
    __shared__ int mine[64];
    int t = threadIdx.x;
    mine[t] = x[blockIdx.x * 64 + t];
    cluster_barrier();
    unsigned address = (unsigned)__cvta_generic_to_shared(&mine[t]), remote;
    int value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank() ^ 1));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
    out[blockIdx.x * 64 + t] = value;
    // a block must not end while its neighbour reads it
    cluster_barrier();
}

// *out[cluster] = sum of x over the cluster's four blocks of 32 threads: all add into the first block's counter.
extern "C" __global__ void __cluster_dims__(4, 1, 1) cluster_sum(const int* x, int* out) {
    __shared__ int sum;
    if (threadIdx.x == 0) sum = 0;
    cluster_barrier();
    unsigned address = (unsigned)__cvta_generic_to_shared(&sum), first;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(first) : "r"(address), "r"(0));
    asm volatile("red.relaxed.cluster.shared::cluster.add.s32 [%0], %1;" ::"r"(first),
                 "r"(x[blockIdx.x * 32 + threadIdx.x])
                 : "memory");
    cluster_barrier();
    if (rank() == 0 && threadIdx.x == 0) out[blockIdx.x / 4] = sum;
}
