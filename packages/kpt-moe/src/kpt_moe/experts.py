"""The experts of a Mixture-of-Experts layer: op `moe.experts`."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kpt_core import KptError, next_power_of_two, op

from . import _experts_grouped, _experts_loop
from ._experts_check import check_experts
from ._scaled import scale_of_stored
from .activations import Activation
from .grouped_mm import grouped_mm
from .permutation import sort_by_expert
from .scaled_grouped_mm import scaled_grouped_mm


def _size_key(
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
) -> tuple[int | str, ...]:
    """Tokens, rounded since they vary from call to call; top_k, experts, hidden size, width; and the layout."""
    width = gate_up_proj.shape[2 if transposed else 1]
    layout = "transposed" if transposed else "plain"
    if gate_up_scale is not None or down_scale is not None:
        layout += " float8"
    return next_power_of_two(x.shape[0]), top_k_index.shape[1], gate_up_proj.shape[0], x.shape[1], width, layout


@op(
    "moe.experts",
    check=check_experts,
    size_key=_size_key,
    composed_of=("moe.grouped_mm", "moe.grouped_mm_wgrad", "moe.scaled_grouped_mm"),
    autocast=("x", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"),
)
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
) -> Tensor:
    """Send every token through its experts and sum what they give, weighted by the routing.

    `out[t] = sum_k top_k_weights[t, k] * (act(x[t] @ up[e] + up_bias[e]) @ down[e] + down_bias[e])` with
    `e = top_k_index[t, k]`.

    For backward the input, the pre-activation, the routing and its sorted order are saved, and nothing else: the
    gradient of the routing weights is taken as `<dA', A>` at the down projection's input (SonicMoE, arXiv:2512.14080).
    The backward itself is not differentiable, and the transforms of torch.func (vmap, jvp) raise.

    Args:
        x: `[tokens, hidden_size]`; float64, float32, bfloat16 or float16.
        top_k_index: `[tokens, top_k]` int64 or int32. Pairs with a negative id or one at or above the number of
            experts (another rank's experts, dropped pairs) contribute nothing and get no gradient.
        top_k_weights: `[tokens, top_k]`, any of the dtypes of x.
        gate_up_proj: `[num_experts, width, hidden_size]`, or `[num_experts, hidden_size, width]` if `transposed`; width
            is `2 * intermediate_size` for gated activations, else `intermediate_size`.
        down_proj: `[num_experts, hidden_size, intermediate_size]`, or its last two exchanged if `transposed`.
        gate_up_proj_bias: `[num_experts, width]`.
        down_proj_bias: `[num_experts, hidden_size]`.
        activation: gated `swiglu`, `geglu`, `geglu_tanh`, `reglu`; plain `silu`, `gelu`, `gelu_tanh`, `relu`, `relu2`.
        transposed: the matrices are stored as input by output (gpt-oss) rather than output by input (the default).
        interleaved: gate and up rows alternate (gpt-oss) instead of being two halves.
        alpha: factor inside the sigmoid of `swiglu`; this and the next two are for `swiglu` alone.
        beta: what is added to the up projection of `swiglu`.
        limit: bound of gate (above) and up (both sides) in `swiglu`; None for none.
        gate_up_scale: float32 (or float64), what the numbers of a `gate_up_proj` of float8_e4m3fn or float8_e5m2 are
            multiplied by; the products are then those of quantised weights, which are frozen.
            `[num_experts, width]`, one for each output channel, or one for each block of 128 by 128 of the stored
            matrices, `[num_experts, ceil(width / 128), ceil(hidden_size / 128)]` (exchanged if `transposed`), as in
            DeepSeek-V3. None: `gate_up_proj` is not quantised.
        down_scale: likewise of `down_proj`.

    Returns:
        `[tokens, hidden_size]` of x's dtype.

    Raises:
        InputError: a shape, dtype or device does not fit, the activation has no such parameter, or quantised weights
            require a gradient.
        UnknownNameError: no such activation.
    """
    act = Activation(activation, alpha, beta, limit, interleaved)
    order, offsets = sort_by_expert(top_k_index, gate_up_proj.shape[0])
    floats = (x, top_k_weights, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias)
    training = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in floats)
    scales = scale_of_stored(gate_up_scale, transposed), scale_of_stored(down_scale, transposed)
    # Under torch.func the autograd function raises, where the loop alone would let a derivative be zero.
    if training or torch._C._are_functorch_transforms_active():
        return _Experts.apply(  # type: ignore[no-any-return,no-untyped-call]
            *floats, order, offsets, act, transposed, *scales
        )
    return _forward(*floats, order, offsets, act, transposed, *scales, training=False)[0]


def _forward(
    x: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Tensor | None,
    down_proj_bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    act: Activation,
    transposed: bool,
    up_scale: Tensor | None,
    down_scale: Tensor | None,
    training: bool,
) -> tuple[Tensor, Tensor]:
    """The output, and the pre-activation if training."""
    up, down = (gate_up_proj, down_proj) if transposed else (gate_up_proj.mT, down_proj.mT)
    biases, scales = (gate_up_proj_bias, down_proj_bias), (up_scale, down_scale)
    return _way(x, scales).forward(  # type: ignore[no-any-return]
        x, top_k_weights, up, down, *biases, order, offsets, act, training, *scales
    )


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        top_k_weights: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        gate_up_proj_bias: Tensor | None,
        down_proj_bias: Tensor | None,
        order: Tensor,
        offsets: Tensor,
        act: Activation,
        transposed: bool,
        up_scale: Tensor | None,
        down_scale: Tensor | None,
    ) -> Tensor:
        tensors = (x, top_k_weights, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias, order, offsets)
        out, h = _forward(*tensors, act, transposed, up_scale, down_scale, training=True)
        ctx.act, ctx.transposed = act, transposed
        ctx.save_for_backward(*tensors, h, up_scale, down_scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = _Experts._gradients(ctx, grad)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # A graph of the gradients is wanted (create_graph=True). torch's once_differentiable would leave them out
            # of it without a word where `grad` is a constant: a gradient penalty would then train nothing.
            grads = _NotTwice.apply(*ctx.saved_tensors[:6], grad, *grads)  # type: ignore[no-untyped-call]
        return *grads, None, None, None, None, None, None

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, top_k_weights, gate_up_proj, down_proj, up_bias, down_bias, order, offsets, h, *scales = ctx.saved_tensors
        up, down = (gate_up_proj, down_proj) if ctx.transposed else (gate_up_proj.mT, down_proj.mT)
        tensors = (grad, x, top_k_weights, up, down, up_bias, down_bias, order, offsets, h)
        grads = _way(x, scales).backward(*tensors, ctx.act, ctx.needs_input_grad[:6], *scales)
        grad_x, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias = grads
        if not ctx.transposed:
            grad_up = None if grad_up is None else grad_up.mT
            grad_down = None if grad_down is None else grad_down.mT
        return grad_x, grad_weights, grad_up, grad_down, grad_up_bias, grad_down_bias


class _NotTwice(torch.autograd.Function):
    """Gradients (the last six arguments) tied to what they depend on, so that differentiating them raises."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[-6:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise KptError("moe.experts has no second derivative; kpt_moe.composed_experts has one")


def _way(x: Tensor, scales: Sequence[Tensor | None]) -> ModuleType:
    """The module that computes it, by a loop or by grouped products."""
    quantised = any(scale is not None for scale in scales)
    loop = _in_host_memory(x) and not (quantised and scaled_grouped_mm.has_kernel(x))
    return _experts_loop if loop else _experts_grouped


def _in_host_memory(x: Tensor) -> bool:
    """Whether to loop over experts here, or to call `moe.grouped_mm`, for which a backend may have a kernel."""
    return x.device.type in ("cpu", "meta") and not grouped_mm.has_kernel(x)
