"""`moe.grouped_mm` and `moe.grouped_mm_wgrad` by JAX's grouped kernels."""

from torch import Tensor

from kpt_backend_tpu.bridge import call as jax
from kpt_backend_tpu.tiles import tile_of
from kpt_core import Call


def forward(call: Call) -> Tensor:
    """`moe.grouped_mm`."""
    return product(call.x, call.weight, call.offsets)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """Of `moe.grouped_mm`."""
    grads = {}
    if "x" in call.needs:
        grads["x"] = product(grad, call.weight, call.offsets, transposed=True)
    if "weight" in call.needs:
        grads["weight"] = weight_gradient(call.x, grad, call.offsets)
    return grads


def forward_wgrad(call: Call) -> Tensor:
    """`moe.grouped_mm_wgrad`."""
    return weight_gradient(call.x, call.grad, call.offsets)


def backward_wgrad(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """Of `moe.grouped_mm_wgrad`."""
    grads = {}
    if "x" in call.needs:
        grads["x"] = product(call.grad, grad, call.offsets, transposed=True)
    if "grad" in call.needs:
        grads["grad"] = product(call.x, grad, call.offsets)
    return grads


def product(x: Tensor, weight: Tensor, offsets: Tensor, *, transposed: bool = False) -> Tensor:
    """Multiply each group's rows `[rows, K]` by its matrix `[groups, K, N]`, or `[groups, N, K]` if `transposed`."""
    rows, inner = x.shape
    groups, columns = weight.shape[0], weight.shape[1 if transposed else 2]
    if not (rows and inner and columns and groups):
        return x.new_zeros(rows, columns)
    tile = tile_of(rows, groups, inner, columns, x.element_size())
    found: Tensor = jax("grouped_mm:product", x, weight, offsets, tile=tile, transposed=transposed)
    return found


def weight_gradient(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """Multiply, for each group, its rows `[rows, K]` transposed by its rows `[rows, N]`."""
    (rows, inner), columns, groups = x.shape, grad.shape[1], offsets.shape[0]
    if not (rows and inner and columns and groups):
        return x.new_zeros(groups, inner, columns)
    tile = tile_of(rows, groups, inner, columns, x.element_size())
    found: Tensor = jax("grouped_mm:weight_gradient", x, grad, offsets, tile=tile)
    return found
