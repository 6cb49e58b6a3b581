// The types of the CUDA runtime's C API that launchers mention (see cuda_runtime.h beside this).
#pragma once

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInvalidConfiguration };
using cudaStream_t = struct CudaStream*;
