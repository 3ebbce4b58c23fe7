#!/bin/sh
# Makes the .ptx files of this folder from the .cu files. NVCC names the compiler (CUDA 13.0).
# The PTX keeps line information; folders are cut off its paths, so that the result is the same everywhere.
set -eu
cd "$(dirname "$0")"
NVCC=${NVCC:-nvcc}
ptx() { # name, architecture, name of the result
    $NVCC -ptx -lineinfo -std=c++17 -arch="sm_$2" "$1.cu" -o "$3.ptx"
    sed -i -E 's|(\.file[[:space:]]+[0-9]+ )".*/([^/"]*)"|\1"\2"|' "$3.ptx"
}
for name in basic half softmax gemm cooperative checks assert order tables; do ptx $name 80 $name; done
ptx fp8 89 fp8
ptx cluster 90 cluster
ptx bulk 90 bulk
# the same kernels as compiled for one architecture only
ptx basic 90a basic.sm_90a
ptx gemm 90a gemm.sm_90a
ptx half 90 half.sm_90
ptx softmax 120 softmax.sm_120
