"""The experts of a Mixture-of-Experts layer: gather, gate and up projection, activation, down projection, weighted sum.

Training saves the input, the pre-activation, the routing and its sorted order, and nothing else.
"""

from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor

from kpt_triton.tile import Tile

from .checking import check_experts, check_scale
from .combine import combine, segment_sum
from .decode import Strip, decode
from .experts_backward import multiply_and_differentiate
from .experts_forward import Gating, multiply_and_activate, scales_of
from .grouped_mm import multiply
from .grouped_mm_wgrad import multiply_transposed
from .launching import on_its_device
from .sorting import sort_pairs
from .tiles import chip_of, default_tile, is_aligned, product_of

_library = torch.library.Library("kpt_triton", "FRAGMENT")
_library.define(
    "experts_forward(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor up, Tensor down, Tensor? up_bias, "
    "Tensor? down_bias, Tensor? up_scale, Tensor? down_scale, str activation, bool interleaved, float alpha, "
    "float beta, float? limit, str tiles) -> Tensor"
)
_library.define(
    "experts_training(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor up, Tensor down, Tensor? up_bias, "
    "Tensor? down_bias, Tensor? up_scale, Tensor? down_scale, str activation, bool interleaved, float alpha, "
    "float beta, float? limit, str tiles) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "experts_backward(Tensor grad, Tensor x, Tensor top_k_weights, Tensor up, Tensor down, Tensor? up_bias, "
    "Tensor? down_bias, Tensor? up_scale, Tensor? down_scale, Tensor h, Tensor order, Tensor position, "
    "Tensor offsets, bool[] needed, str activation, bool interleaved, float alpha, float beta, float? limit, "
    "str tiles) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

#: Up to so many tokens are computed pair by pair, unless several of them are likely to share an expert.
_FEW_TOKENS = 8


def is_few(tokens: int, top_k: int, experts: int) -> bool:
    """Whether so many tokens are computed pair by pair: an expert of two of them would be read twice."""
    return tokens == 1 or (0 < tokens <= _FEW_TOKENS and tokens * top_k * 4 <= experts)


@dataclass(frozen=True, slots=True)
class ExpertsTiles:
    """The tiles of all products, as `kpt_triton.tile.Tile` writes them; "" leaves the choice to the defaults.

    Attributes:
        up: of the gate and up projection.
        down: of the down projection, and of the gradient of the input.
        slope: of the gradient behind the down projection.
        wgrad: of the gradients of both projections.
    """

    up: str = ""
    down: str = ""
    slope: str = ""
    wgrad: str = ""

    def __str__(self) -> str:
        return ";".join(astuple(self))

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, text: str) -> Self:
        """The tiles that are written so, or none."""
        return cls(*text.split(";")) if text else cls()


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    *,
    activation: str = "swiglu",
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    tiles: ExpertsTiles | None = None,
) -> Tensor:
    """Send every token through its experts and sum what they give, weighted by the routing.

    Differentiable with respect to all that floats, once: a second derivative raises.

    Args:
        x: `[tokens, hidden_size]`; float32, bfloat16 or float16, with float32 sums.
        top_k_index: `[tokens, top_k]` int64 or int32; ids that are negative or at and above the number of experts
            contribute nothing.
        top_k_weights: `[tokens, top_k]` of any of x's dtypes.
        gate_up_proj: `[experts, width, hidden_size]`, or its last two exchanged if `transposed`; width is
            `2 * inner` for gated activations, else `inner`.
        down_proj: `[experts, hidden_size, inner]`, or exchanged if `transposed`.
        gate_up_proj_bias: `[experts, width]`.
        down_proj_bias: `[experts, hidden_size]`.
        activation: a name of `kpt_triton.moe.activation`.
        transposed: matrices are stored as input by output.
        interleaved: gate and up alternate instead of being two halves.
        alpha: factor inside the sigmoid of `swiglu`.
        beta: what is added to the up projection of `swiglu`.
        limit: bound of gate and up in `swiglu`.
        gate_up_scale: float32 scales of 8-bit weights: `[experts, width]`, or one for each 128 by 128 of the stored
            matrices.
        down_scale: likewise.
        tiles: configurations; None leaves the choice to `kpt_triton.moe.tiles`.

    Returns:
        `[tokens, hidden_size]` of x's dtype.

    Raises:
        ValueError: a shape, dtype or device does not fit, or there is no such activation.
    """
    up, down = (gate_up_proj, down_proj) if transposed else (gate_up_proj.mT, down_proj.mT)
    check_experts(x, top_k_index, top_k_weights, up, down, gate_up_proj_bias, down_proj_bias, activation)
    scales = _scale_of_stored(gate_up_scale, transposed), _scale_of_stored(down_scale, transposed)
    check_scale("experts", up, scales[0])
    check_scale("experts", down, scales[1])
    options = (activation, interleaved, alpha, beta, limit, str(tiles or ""))
    floats = (x, top_k_weights, up, down, gate_up_proj_bias, down_proj_bias)
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floats)
    # Under torch.func the autograd function raises, where the op alone would let a derivative be zero.
    if training or torch._C._are_functorch_transforms_active():
        return _Experts.apply(*floats, top_k_index, *scales, options)  # type: ignore[no-any-return,no-untyped-call]
    return torch.ops.kpt_triton.experts_forward.default(  # type: ignore[no-any-return]
        x, top_k_index, top_k_weights, *floats[2:], *scales, *options
    )


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        top_k_weights: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        top_k_index: Tensor,
        up_scale: Tensor | None,
        down_scale: Tensor | None,
        options: tuple[Any, ...],
    ) -> Tensor:
        rest = (up, down, up_bias, down_bias, up_scale, down_scale)
        out, *sorted_rows = torch.ops.kpt_triton.experts_training.default(
            x, top_k_index, top_k_weights, *rest, *options
        )
        ctx.options = options
        ctx.save_for_backward(x, top_k_weights, *rest, *sorted_rows)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        needed = ctx.needs_input_grad[:6]
        with torch.no_grad():
            found = torch.ops.kpt_triton.experts_backward.default(grad, *ctx.saved_tensors, list(needed), *ctx.options)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # A graph of the gradients is wanted (create_graph=True): it must not leave these out without a word.
            found = _NotTwice.apply(*ctx.saved_tensors[:6], grad, *found)  # type: ignore[no-untyped-call]
        return *(g if wanted else None for g, wanted in zip(found, needed, strict=True)), None, None, None, None


class _NotTwice(torch.autograd.Function):
    """Gradients (the last six arguments) tied to what they depend on, so that differentiating them raises."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[-6:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("kpt_triton.moe.experts has no second derivative")


def _scale_of_stored(scale: Tensor | None, transposed: bool) -> Tensor | None:
    """The scale `[experts, a, b]` of matrices `[experts, K, N]`, from that of stored ones."""
    if scale is None:
        return None
    scale = scale.float()
    if scale.dim() == 2:
        return scale.unsqueeze(1)
    return scale if transposed else scale.mT


def _tile(written: str, product: str, x: Tensor, weight: Tensor, rows: int) -> Tile:
    if written:
        return Tile.parse(written)
    experts, *sizes = weight.shape
    return default_tile(product, chip_of(x.device), x.element_size(), rows, experts, is_aligned(*sizes))


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


@torch.library.impl(_library, "experts_forward", "CompositeExplicitAutograd")
@on_its_device
def _forward(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    up_scale: Tensor | None,
    down_scale: Tensor | None,
    activation: str,
    interleaved: bool,
    alpha: float,
    beta: float,
    limit: float | None,
    tiles: str,
) -> Tensor:
    act = Gating(activation, interleaved, alpha, beta, limit)
    tensors = (top_k_weights.contiguous(), up, down, _contiguous(up_bias), _contiguous(down_bias), up_scale, down_scale)
    tokens, top_k = top_k_index.shape
    # Weights whose columns are contiguous would be read in pieces of two bytes, pair by pair.
    fast = up.stride(1) == 1 and down.stride(1) == 1 and down.shape[1] > 0
    if fast and is_few(tokens, top_k, up.shape[0]):
        of = scales_of(up_scale, up), scales_of(down_scale, down)
        return decode(x, top_k_index.contiguous(), *tensors, of, act, Strip(k=128 if "block" in of else 256))
    return _sorted_forward(x, top_k_index, *tensors, act, ExpertsTiles.parse(tiles), save=False)[0]


@torch.library.impl(_library, "experts_training", "CompositeExplicitAutograd")
@on_its_device
def _training(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    up_scale: Tensor | None,
    down_scale: Tensor | None,
    activation: str,
    interleaved: bool,
    alpha: float,
    beta: float,
    limit: float | None,
    tiles: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    act = Gating(activation, interleaved, alpha, beta, limit)
    tensors = (top_k_weights.contiguous(), up, down, _contiguous(up_bias), _contiguous(down_bias), up_scale, down_scale)
    return _sorted_forward(x, top_k_index, *tensors, act, ExpertsTiles.parse(tiles), save=True)


def _sorted_forward(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    up_scale: Tensor | None,
    down_scale: Tensor | None,
    act: Gating,
    tiles: ExpertsTiles,
    *,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, the pre-activation, and the order, position and offsets of the sorted rows."""
    top_k, num_experts = top_k_index.shape[1], up.shape[0]
    order, position, offsets = sort_pairs(top_k_index, num_experts)
    rows = order.shape[0]
    activated, h = multiply_and_activate(
        x,
        up,
        order,
        offsets,
        top_k,
        act,
        _tile(tiles.up, act.product, x, up, rows),
        bias=up_bias,
        scale=up_scale,
        scales_of=scales_of(up_scale, up),
        save=save,
    )
    y = multiply(
        activated,
        down,
        offsets,
        _tile(tiles.down, product_of(scales_of(down_scale, down)), x, down, rows),
        order=order,
        weights=top_k_weights,
        bias=down_bias,
        scale=down_scale,
        scales_of=scales_of(down_scale, down),
    )
    return _sum_choices(y, position, offsets, x, top_k), h, order, position, offsets


def _sum_choices(rows: Tensor, position: Tensor, offsets: Tensor, x: Tensor, top_k: int) -> Tensor:
    if rows.numel() == 0:
        return x.new_zeros(x.shape[0], rows.shape[1])
    return combine(rows, position, offsets, None, top_k, x.dtype)


@torch.library.impl(_library, "experts_backward", "CompositeExplicitAutograd")
@on_its_device
def _backward(
    grad: Tensor,
    x: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    up_scale: Tensor | None,
    down_scale: Tensor | None,
    h: Tensor,
    order: Tensor,
    position: Tensor,
    offsets: Tensor,
    needed: list[bool],
    activation: str,
    interleaved: bool,
    alpha: float,
    beta: float,
    limit: float | None,
    tiles: str,
) -> tuple[Tensor, ...]:
    need_x, need_weights, need_up, need_down, need_up_bias, need_down_bias = needed
    act, chosen = Gating(activation, interleaved, alpha, beta, limit), ExpertsTiles.parse(tiles)
    rows, top_k = order.shape[0], top_k_weights.shape[1]
    weights = top_k_weights.contiguous()
    down_scale = None if down_scale is None else down_scale.mT
    up_scale = None if up_scale is None else up_scale.mT
    grad_h, weighted, dots = multiply_and_differentiate(
        grad,
        down.mT,
        h,
        weights,
        order,
        offsets,
        act,
        _tile(chosen.slope, "slope", x, down, rows),
        need_h=need_x or need_up or need_up_bias,
        need_weighted=need_down,
        need_dots=need_weights,
        bias=_contiguous(up_bias),
        scale=down_scale,
        scales_of=scales_of(down_scale, down.mT),
    )
    # Results of an op may not be one tensor.
    grad_x, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias = (x.new_empty(0) for _ in range(6))
    if need_weights:
        of_pairs = dots[position]
        if down_bias is not None:
            by_expert = grad.float() @ down_bias.float().t()
            experts_of_rows = _expert_of_rows(offsets, rows)[position]
            of_pairs = of_pairs + by_expert.gather(1, experts_of_rows.view_as(weights)).flatten()
        grad_weights = torch.where(position < offsets[-1:], of_pairs, 0).view_as(weights).to(weights.dtype)
    gathered: dict[str, Any] = {"order": order, "top_k": top_k}
    if need_down:
        tile = _tile(chosen.wgrad, "wgrad", x, down, rows)
        grad_down = (
            multiply_transposed(grad, weighted, offsets, tile, gather_x=True, **gathered).mT
            if _stored_as_output_by_input(down)
            else multiply_transposed(weighted, grad, offsets, tile, gather_grad=True, **gathered)
        )
    if need_up:
        tile = _tile(chosen.wgrad, "wgrad", x, up, rows)
        grad_up = (
            multiply_transposed(grad_h, x, offsets, tile, gather_grad=True, **gathered).mT
            if _stored_as_output_by_input(up)
            else multiply_transposed(x, grad_h, offsets, tile, gather_x=True, **gathered)
        )
    if need_up_bias:
        grad_up_bias = segment_sum(grad_h, offsets, None, x.dtype)
    if need_down_bias:
        pairs = order.long()
        grad_down_bias = segment_sum(grad[pairs // top_k], offsets, weights.flatten()[pairs], x.dtype)
    if need_x:
        grad_rows = multiply(
            grad_h,
            up.mT,
            offsets,
            _tile(chosen.down, product_of(scales_of(up_scale, up.mT)), x, up, rows),
            scale=up_scale,
            scales_of=scales_of(up_scale, up.mT),
        )
        grad_x = _sum_choices(grad_rows, position, offsets, x, top_k)
    return grad_x, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias


def _stored_as_output_by_input(weight: Tensor) -> bool:
    """Whether the gradient of `weight` `[experts, K, N]` is to have N before K in memory, as the weight has."""
    return weight.stride(1) < weight.stride(2)


def _expert_of_rows(offsets: Tensor, rows: int) -> Tensor:
    positions = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, positions, right=True).clamp_(max=offsets.numel() - 1)


@torch.library.register_fake("kpt_triton::experts_forward", lib=_library)
def _forward_fake(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, up: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("kpt_triton::experts_training", lib=_library)
def _training_fake(
    x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, up: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    pairs = top_k_index.numel()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    order, position = (top_k_index.new_empty(pairs, dtype=torch.int32) for _ in range(2))
    return out, x.new_empty(pairs, up.shape[2]), order, position, order.new_empty(up.shape[0])


@torch.library.register_fake("kpt_triton::experts_backward", lib=_library)
def _backward_fake(
    grad: Tensor,
    x: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    up_scale: Tensor | None,
    down_scale: Tensor | None,
    h: Tensor,
    order: Tensor,
    position: Tensor,
    offsets: Tensor,
    needed: list[bool],
    *rest: Any,
) -> tuple[Tensor, ...]:
    def like(weight: Tensor) -> Tensor:
        experts, inner, columns = weight.shape
        if _stored_as_output_by_input(weight):
            return x.new_empty(experts, columns, inner).mT
        return x.new_empty(experts, inner, columns)

    made = (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(top_k_weights, memory_format=torch.contiguous_format),
        like(up),
        like(down),
        x.new_empty(up.shape[0], up.shape[2]),
        x.new_empty(down.shape[0], down.shape[2]),
    )
    return tuple(each if wanted else x.new_empty(0) for each, wanted in zip(made, needed, strict=True))
