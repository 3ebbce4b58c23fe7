// FP8 conversions (sm_89): e4m3 and e5m2 of pairs of f32 and back.

// codes[i] = x[2i] in the low byte and x[2i + 1] in the high byte as e4m3, saturating; back[2i …] = their values.
extern "C" __global__ void e4m3(const float* x, unsigned short* codes, float* back, int pairs) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    unsigned short code;
    unsigned two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(two) : "h"(code));
    codes[i] = code;
    asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;}"
        : "=f"(back[2 * i]), "=f"(back[2 * i + 1])
        : "r"(two));
}

// The same as e5m2.
extern "C" __global__ void e5m2(const float* x, unsigned short* codes, float* back, int pairs) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= pairs) return;
    unsigned short code;
    unsigned two;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(code) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(two) : "h"(code));
    codes[i] = code;
    asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;}"
        : "=f"(back[2 * i]), "=f"(back[2 * i + 1])
        : "r"(two));
}
