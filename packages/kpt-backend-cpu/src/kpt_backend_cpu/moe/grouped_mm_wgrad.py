"""`moe.grouped_mm_wgrad` natively: the gradient of each expert's matrix."""

from torch import Tensor

from kpt_backend_cpu.tensors import readable, readable_call
from kpt_core import Call

from .products import multiply, multiply_transposed, unsupported

__all__ = ["backward", "forward", "unsupported"]

NAME = "moe.grouped_mm_wgrad"


def forward(call: Call) -> Tensor:
    """`moe.grouped_mm_wgrad`, summed in float32."""
    call = readable_call(NAME, call)
    return multiply_transposed(NAME, call.x, call.grad, call.offsets)


def backward(call: Call, saved: tuple[Tensor, ...], grad_weight: Tensor) -> dict[str, Tensor]:
    """The gradients of the rows `x` and `grad`."""
    call, grad_weight = readable_call(NAME, call), readable(NAME, "the gradient of the result", grad_weight)
    factors = {"x": (call.grad, grad_weight.mT), "grad": (call.x, grad_weight)}
    return {name: multiply(NAME, *factors[name], call.offsets, call.x.dtype) for name in call.needs}
