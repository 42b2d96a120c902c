"""What the Triton kernels of several ops share: checks, launches, column sums, and the means to test without a GPU.

support       whether Triton can run here; argument checks and launch arithmetic, which CUDA C++ kernels use too
columns       the second stage of every column sum: partials in a fixed order into a flat fp32 buffer
interpreter   repairs of Triton's interpreter, so that bf16 kernels run on a CPU
compiled      compile a kernel for a card that is not there; read registers, spills, shared memory, layouts
"""
