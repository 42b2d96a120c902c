// A kernel a tool of compute-sanitizer, with the mistake that it is for.
extern "C" __global__ void memcheck(float* x, int n) { x[n + threadIdx.x] = 1.0f; }
extern "C" __global__ void racecheck(float* x, int n) {
  __shared__ float shared[64];
  shared[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = shared[63 - threadIdx.x];
}
extern "C" __global__ void synccheck(float* x, int n) {
  if (threadIdx.x % 32 < 16) __syncwarp(0xffff0000u);
  if (threadIdx.x < 40) __syncthreads();
  x[threadIdx.x] = 1.0f;
}
extern "C" __global__ void initcheck(float* x, int n) { x[threadIdx.x] += 1.0f; }
