"""One torch thread a worker; Triton kernels run in the interpreter where there is no CUDA card."""

import torch

from ridgeline.ops._triton import interpreter

torch.set_num_threads(1)
interpreter.enable()
