// Functions that are called through tables.

struct Shape {
    int a = 3;
    __device__ virtual int area(int x) { return x + a; }
    __device__ virtual ~Shape() {}
};
struct Square : Shape {
    __device__ int area(int x) override { return x * x + a; }
};

// The destructors in the tables free memory, which nobody does here. out[i] = i + 3 or i * i + 3.
extern "C" __global__ void good_virtual(int* out) {
    Shape shape;
    Square square;
    int i = threadIdx.x;
    Shape* p = i % 2 ? (Shape*)&square : &shape;
    out[i] = p->area(i);
}

__device__ int again(int n);
__device__ int (*tables[1])(int) = {again};
__device__ __noinline__ int again(int n) {
    int local[4];
    local[n & 3] = n;
    int rest = n <= 0 ? 0 : tables[n >> 20](n - 1);
    return rest + local[n & 3];
}

extern "C" __global__ void bad_recursion(int* n, int* out) { *out = tables[*n >> 20](*n); }

// 128-bit division: the compiler's own chain of carries.
extern "C" __global__ void divide128(const unsigned long long* high, const unsigned long long* low,
                                     const unsigned long long* by, unsigned long long* out) {
    int i = threadIdx.x;
    unsigned __int128 x = (unsigned __int128)high[i] << 64 | low[i];
    unsigned __int128 q = x / by[i];
    out[2 * i] = (unsigned long long)q;
    out[2 * i + 1] = (unsigned long long)(q >> 64);
}
