"""What the cases of compute-sanitizer share: the device, the register of cases, data and products made on the host."""

import os

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.ops._triton import interpreter

interpreter.enable()  # does nothing on a card; before any kernel is imported

from ridgeline.ops import _cuda as cuda
from ridgeline.ops.dropout import DropoutState
from ridgeline.ops.linear import Masks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOOL = os.environ.get("SANITIZER_TOOL", "memcheck")
CASES, CONTROLS = {}, set()


def case(function):
    CASES[function.__name__] = function
    return function


def control(function):
    """A case that shows what the tool does, and says nothing of this package's kernels."""
    CONTROLS.add(function.__name__)
    return case(function)


class ProductsOnHost(TorchDispatchMode):
    """PyTorch's products of tensors on a card, computed on the host: no process has a kernel of cuBLAS.

    Racecheck ends in an error of its own in every process that has one, and initcheck does not see what they write.
    """

    PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "matmul")
    KIND = "cuda"
    REFUSED = ("addmm_", "baddbmm_", "addbmm", "_addmm_activation", "convolution", "_scaled_mm")

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if name not in self.PRODUCTS + self.REFUSED or args[0].device.type != self.KIND:
            return func(*args, **kwargs)
        if name in self.REFUSED:
            raise RuntimeError(f"a library's kernel that no case should need: {func}")
        self.calls += 1
        out, named = kwargs.pop("out", None), [x for x in args if isinstance(x, torch.dtype)]
        dtype = kwargs.pop("out_dtype", named[0] if named else args[0].dtype)
        wide = torch.float64 if args[0].dtype == torch.float64 else torch.float32
        host = [x.to("cpu", wide) for x in args if isinstance(x, torch.Tensor)]
        result = func.overloadpacket(*host, **kwargs).to(dtype).to(args[0].device)
        return result if out is None else out.copy_(result)


def tell_of_copies():
    """After each launch, whatever the kernel has a map of is written again from the host: initcheck does not see the
    copy engine write, and the copy engine writes by maps alone."""
    mapped, make, launch = {}, cuda.tensor_map, cuda.Kernel.launch

    def tensor_map(tensor, *rest, **named):
        found = make(tensor, *rest, **named)
        mapped[found] = tensor.data  # whose version a copy leaves alone; kept, so that its address stays its own
        return found

    def launch_and_write(kernel, grid, block, smem, arguments):
        launch(kernel, grid, block, smem, arguments)
        maps = b"".join(x for x in arguments if isinstance(x, bytes) and len(x) % 128 == 0)
        for at in range(0, len(maps), 128):
            if (tensor := mapped.get(maps[at : at + 128])) is not None:
                tensor.copy_(tensor.cpu())

    cuda.tensor_map, cuda.Kernel.launch = tensor_map, launch_and_write


def draw(*shape, dtype=None, scale=1.0, shift=0.0):
    """Made on the host, so that no kernel but those under test has to be instrumented."""
    return (torch.randn(shape) * scale + shift).to(dtype or torch.bfloat16).to(DEVICE).requires_grad_()


def differentiate(outputs, leaves):
    """A forward pass has run; its backward pass, of random gradients."""
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]
    leaves = [leaf for leaf in leaves if leaf is not None]
    grads = torch.autograd.grad(outputs, leaves, [draw(*out.shape, dtype=out.dtype).detach() for out in outputs])
    for x in (*outputs, *grads):
        assert torch.isfinite(x.detach().cpu()).all(), "not finite"


def masks(T, p=0.2):
    return Masks(p, dropout_state(), 4, T)


def dropout_state():
    return DropoutState(torch.tensor([2**40 + 17, 5]).to(DEVICE), 3)


def impl(name):
    return name if DEVICE == "cuda" or not name.startswith("cuda") else "reference"
