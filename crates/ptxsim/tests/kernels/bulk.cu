// Bulk copies with mbarriers (sm_90): out[i] = 2 * x[i] for tiles of 256 floats, `tiles` of them, one block of 128
// threads. Two buffers: thread 0 starts the copy of tile i + 2 when all have read buffer i % 2. Results leave by bulk
// copies too.

__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

constexpr int TILE = 256;

__device__ void start(float* to, unsigned long long* barrier, const float* from) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(TILE * 4)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(TILE * 4), "r"(shared_address(barrier))
        : "memory");
}

__device__ void wait(unsigned long long* barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

extern "C" __global__ void double_tiles(const float* x, float* out, int tiles) {
    __shared__ __align__(128) float in[2][TILE];
    __shared__ __align__(128) float result[2][TILE];
    __shared__ unsigned long long full[2];
    int t = threadIdx.x;
    if (t == 0) {
        for (int i = 0; i < 2; i++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[i])) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (t == 0)
        for (int i = 0; i < 2 && i < tiles; i++) start(in[i], &full[i], x + i * TILE);
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        int b = i % 2;
        wait(&full[b], i / 2 % 2);
        // the copy out of this buffer, two tiles ago, must have read it
        if (t == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        __syncthreads();
        for (int j = t; j < TILE; j += 128) result[b][j] = 2 * in[b][j];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (t == 0) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out + i * TILE),
                         "r"(shared_address(result[b])), "r"(TILE * 4)
                         : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            if (i + 2 < tiles) start(in[b], &full[b], x + (i + 2) * TILE);
        }
    }
    if (t == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// A ring of three buffers: warp 0 fills, warps 1 to 3 read, each tile 96 words. out[i] is the sum over tiles of word i.
// Barriers are told of the bytes before the copy sets out. `skip`: the last wait for a full buffer is missing.
__device__ void ring(const int* x, int* out, int tiles, bool skip) {
    constexpr int STAGES = 3;
    __shared__ __align__(128) int buffer[STAGES][96];
    __shared__ unsigned long long full[STAGES], empty[STAGES];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0)
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[i])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 3;" ::"r"(shared_address(&empty[i])) : "memory");
        }
    __syncthreads();
    if (warp == 0) {
        if (lane == 0)
#pragma unroll 1
            for (int i = 0; i < tiles; i++) {
                int b = i % STAGES;
                wait(&empty[b], i / STAGES % 2 ^ 1);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 384;" ::"r"(shared_address(&full[b]))
                             : "memory");
                asm volatile(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 384, [%2];" ::"r"(
                        shared_address(buffer[b])),
                    "l"(x + i * 96), "r"(shared_address(&full[b]))
                    : "memory");
            }
        return;
    }
    int sum = 0;
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        int b = i % STAGES;
        if (!skip || i < tiles - 1) wait(&full[b], i / STAGES % 2);
        sum += buffer[b][threadIdx.x - 32];
        __syncwarp();
        if (lane == 0)
            asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&empty[b])) : "memory");
    }
    out[threadIdx.x - 32] = sum;
}
extern "C" __global__ void good_ring(const int* x, int* out, int tiles) { ring(x, out, tiles, false); }
extern "C" __global__ void bad_ring(const int* x, int* out, int tiles) { ring(x, out, tiles, true); }

// out[i] = i by copies of 64 words out of two buffers in turn. `leave`: copies that may still read when their buffer is
// written again; two are too many.
template <int LEAVE>
__device__ void send(int* out, int tiles) {
    __shared__ __align__(128) int buffer[2][64];
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEAVE) : "memory");
        __syncthreads();
        buffer[i % 2][threadIdx.x] = i * 64 + threadIdx.x;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0) {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" ::"l"(out + i * 64),
                         "r"(shared_address(buffer[i % 2]))
                         : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
extern "C" __global__ void good_send(int* out, int tiles) { send<1>(out, tiles); }
extern "C" __global__ void bad_send(int* out, int tiles) { send<2>(out, tiles); }
