"""Out of memory: how it is recognised, and what it says to the user."""

import gc
import os
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kpt_backend_nvidia.devices import MemoryStatistics
from kpt_core import KptError

from .sizes import format_bytes

#: What the messages of allocation failures contain that PyTorch raises as a plain RuntimeError.
_FAILURES = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class OutOfMemoryError(KptError, torch.OutOfMemoryError):
    """Memory ran out although everything that could be freed was freed; caught by `torch.OutOfMemoryError` too.

    Attributes:
        requested: bytes asked for; None where PyTorch alone knows.
        memory: the device when the call was given up.
    """

    def __init__(self, message: str, requested: int | None, memory: MemoryStatistics) -> None:
        super().__init__(message)
        self.requested = requested
        self.memory = memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an allocation failure of PyTorch, cuBLAS or cuDNN for which nothing was freed yet."""
    if isinstance(error, OutOfMemoryError):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(failure in str(error) for failure in _FAILURES)


def largest_tensors(device: torch.device, limit: int = 5) -> list[tuple[int, str]]:
    """The storages on `device` that hold the most memory: bytes, and what Python knows of the tensors in them.

    Tensors that only C++ holds, such as those that autograd saved, are not seen.
    """
    users: dict[int, list[Tensor]] = defaultdict(list)
    for found in gc.get_objects():
        # The type is asked, for isinstance would run the `__class__` of proxies.
        if not issubclass(type(found), Tensor) or issubclass(type(found), FakeTensor):
            continue
        if is_traceable_wrapper_subclass(found) or found.layout is not torch.strided or found.device != device:
            continue
        users[found.untyped_storage()._cdata].append(found)
    sized = sorted(
        ((tensors[0].untyped_storage().nbytes(), tensors) for tensors in users.values()), key=lambda s: -s[0]
    )
    described = []
    for nbytes, tensors in sized[:limit]:
        if nbytes == 0:
            break
        shown = max(tensors, key=Tensor.numel)
        kind = "parameter" if any(isinstance(tensor, torch.nn.Parameter) for tensor in tensors) else "tensor"
        views = f", {len(tensors)} views" if len(tensors) > 1 else ""
        dtype = str(shown.dtype).removeprefix("torch.")
        described.append((nbytes, f"{kind} {list(shown.shape)} {dtype}{views}"))
    return described


def explain(
    device: torch.device, memory: MemoryStatistics, margin: int, requested: int | None, remarks: Sequence[str] = ()
) -> str:
    """Why memory ran out on a device, what holds it, and what to do.

    Args:
        device: the device, with its index.
        memory: its memory after freeing.
        margin: bytes that are kept free.
        requested: bytes asked for; None if unknown.
        remarks: sentences on what was tried.
    """
    asked = "memory ran out" if requested is None else f"{format_bytes(requested)} asked for"
    lines = [
        f"{device}: {asked}; of {format_bytes(memory.total)} are free {format_bytes(memory.free)}, of which "
        f"{format_bytes(margin)} are the safety margin; tensors hold {format_bytes(memory.allocated)}, the allocator "
        f"reserves {format_bytes(memory.reserved)}, {format_bytes(memory.elsewhere)} are held elsewhere.",
        *remarks,
    ]
    if largest := largest_tensors(device):
        lines.append("Largest: " + "; ".join(f"{format_bytes(nbytes)} {text}" for nbytes, text in largest) + ".")
    lines.append("Next: " + "; ".join(_next_steps(device, memory, margin, requested)) + ".")
    return "\n".join(lines)


def _next_steps(device: torch.device, memory: MemoryStatistics, margin: int, requested: int | None) -> list[str]:
    steps, cached = [], memory.reserved - memory.allocated
    if requested is not None and requested > memory.total - margin:
        steps.append(f"split the tensor: it can never fit in {format_bytes(memory.total - margin)}")
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    fragmented = cached > max(memory.reserved // 10, (requested or 0) // 2)
    if fragmented and "expandable_segments:True" not in settings:
        steps.append(
            f"start with PYTORCH_ALLOC_CONF=expandable_segments:True: {format_bytes(cached)} are reserved in "
            "pieces that do not fit"
        )
    if memory.elsewhere > memory.total // 10 and device.type == "cuda":
        steps.append(f"look with nvidia-smi for who else holds {format_bytes(memory.elsewhere)}")
    if requested is not None and memory.free > requested:
        steps.append("make the safety margin smaller")
    steps.append("take a smaller batch, or optimize_model_memory(model, checkpoint=True) for training")
    return steps
