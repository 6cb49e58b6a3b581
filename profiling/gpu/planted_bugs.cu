// Three kernels with one bug each. gpu_check.py runs compute-sanitizer on them with the flags that
// it uses for the ops: only a check that finds planted bugs can show that the ops have none. The
// namespace is that of the ops, because the sanitizer selects kernels by name.
//
//   planted_bugs memcheck | racecheck | synccheck
#include <cstdio>
#include <cstring>

namespace specdec {

constexpr int kThreads = 64;

__global__ void writes_past_the_end(int* data) { data[threadIdx.x + 1] = 1; }

__global__ void lacks_a_barrier(int* data) {
  __shared__ int values[kThreads];
  values[threadIdx.x] = data[threadIdx.x];
  data[threadIdx.x] = values[kThreads - 1 - threadIdx.x];
}

__global__ void diverges_at_a_barrier(int* data) {
  if (threadIdx.x < 48) __syncthreads();
  data[threadIdx.x] = 1;
}

}  // namespace specdec

int main(int count, char** arguments) {
  using namespace specdec;
  const char* tool = count > 1 ? arguments[1] : "";
  int* data = nullptr;
  if (cudaMalloc(&data, kThreads * sizeof(int)) != cudaSuccess) return std::puts("no GPU"), 2;
  if (!std::strcmp(tool, "memcheck")) writes_past_the_end<<<1, kThreads>>>(data);
  if (!std::strcmp(tool, "racecheck")) lacks_a_barrier<<<1, kThreads>>>(data);
  if (!std::strcmp(tool, "synccheck")) diverges_at_a_barrier<<<1, kThreads>>>(data);
  cudaDeviceSynchronize();
}
