"""`moe.grouped_mm` natively: each expert's rows times its matrix."""

from torch import Tensor

from kpt_backend_cpu.tensors import readable, readable_call
from kpt_core import Call

from .products import multiply, multiply_transposed, unsupported

__all__ = ["backward", "forward", "unsupported"]

NAME = "moe.grouped_mm"


def forward(call: Call) -> Tensor:
    """`moe.grouped_mm`, summed in float32."""
    call = readable_call(NAME, call)
    return multiply(NAME, call.x, call.weight, call.offsets, call.x.dtype)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """The gradients of rows and matrices, these in the matrices' memory order."""
    call, grad = readable_call(NAME, call), readable(NAME, "the gradient of the result", grad)
    x, weight, offsets, found = call.x, call.weight, call.offsets, {}
    if "x" in call.needs:
        found["x"] = multiply(NAME, grad, weight.mT, offsets, x.dtype)
    if "weight" in call.needs:
        exchanged = weight.stride()[1] < weight.stride()[2]
        found["weight"] = (
            multiply_transposed(NAME, grad, x, offsets).mT if exchanged else multiply_transposed(NAME, x, grad, offsets)
        )
    return found
