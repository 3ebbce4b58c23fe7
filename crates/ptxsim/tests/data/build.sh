#!/bin/sh
# Makes the fatbins of this folder from scale.cu. NVCC names the compiler (CUDA 13.0).
set -eu
cd "$(dirname "$0")"
NVCC=${NVCC:-nvcc}
two="-gencode arch=compute_80,code=[sm_80,compute_80] -gencode arch=compute_90a,code=[sm_90a,compute_90a]"
$NVCC -fatbin $two --no-compress -lineinfo scale.cu -o stored.fatbin
$NVCC -fatbin $two scale.cu -o zstd.fatbin
$NVCC -fatbin $two --compress-mode=speed scale.cu -o lz4.fatbin
# machine code compressed too
$NVCC -fatbin $two --compress-mode=size scale.cu -o size.fatbin
$NVCC -fatbin -gencode arch=compute_80,code=sm_80 -gencode arch=compute_86,code=sm_86 scale.cu -o cubin.fatbin
$NVCC -cubin -arch=sm_80 scale.cu -o scale.cubin
# PTX for a family of architectures, and for newer ones only
$NVCC -fatbin -gencode arch=compute_100f,code=compute_100f -gencode arch=compute_120,code=compute_120 scale.cu -o new.fatbin
