"""Op `moe.grouped_mm_wgrad`: the gradient of the experts' matrices, by the kernel of `transposed`."""

from typing import Any

from torch import Tensor

from kpt_triton.launching import on_its_device

from .grouped_mm import product
from .tiles import tile_for
from .transposed import multiply_transposed


@on_its_device
def forward(call: Any) -> Tensor:
    """Op `moe.grouped_mm_wgrad` for float32, bfloat16 and float16, with float32 sums.

    Args:
        call: the call of the op; its configuration may name a `tile`, see `kpt_triton.tile.Tile`.

    Returns:
        `[experts, K, N]` of x's dtype.
    """
    shape = (call.offsets.shape[0], call.x.shape[1], call.grad.shape[1])
    tile = tile_for("wgrad", call.x, call.x.shape[0], shape, call.config)
    return multiply_transposed(call.x, call.grad, call.offsets, tile)


@on_its_device
def backward(call: Any, saved: tuple[()], grad: Tensor) -> dict[str, Tensor]:
    """The gradients that are wanted, with default tiles.

    Args:
        call: the call of `forward`.
        saved: nothing.
        grad: of its result.
    """
    grads = {}
    if "x" in call.needs:
        grads["x"] = product(call.grad, grad.mT, call.offsets)
    if "grad" in call.needs:
        grads["grad"] = product(call.x, grad, call.offsets)
    return grads
