"""Routing and experts whose results for a token do not depend, in any bit, on the other tokens of the batch."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_core import Call, InputError
from kpt_core.dispatch.autocast import converted, without_autocast

from ._experts_check import check_experts
from .activations import activation_of
from .experts import experts
from .permutation import expert_of_rows, sort_by_expert
from .torch_kernels.grouped_mm import segments, wgrad_like

#: Rows of every matrix product, whatever the batch.
BLOCK = 32
#: Both other sizes of a product are padded to multiples of this. MKL's float32 and float64 products of other sizes give
#: a row different bits at different places of a block.
_MULTIPLE = 16
#: torch shares elementwise work on the CPU among threads, cut anywhere in a row: from 32768 elements on, gelu from
#: 20000.
_ONE_PIECE = 16384


class _Mode(threading.local):
    def __init__(self) -> None:
        # Not a class attribute, for Dynamo's guards.
        self.on = False


_mode = _Mode()


def batch_invariant_mode() -> bool:
    """Whether this thread is inside `batch_invariant()`."""
    return _mode.on


@contextmanager
def batch_invariant() -> Iterator[None]:
    """A block in which a token's routing and its experts' output do not depend on the rest of the batch.

    Matrix libraries pick their kernels, and with them the order of sums, by the number of rows: the same token then
    gets other bits alone than among others, and a router may even choose other experts. What is trained is then not
    what served the rollouts (reinforcement learning). Inside this block, routers, `FeedForwardExpert` and
    `SharedExperts` use products of one fixed shape instead, and sum a token's experts in the order of its choices.
    Values and gradients of tokens are then bitwise the same in any batch, at any place in it. The backward of what ran
    in the block has the same property for gradients of tokens; gradients of parameters are sums over the batch.

    It costs speed: each expert's rows are padded to a multiple of 32, and its intermediate results are saved.

    What it holds for: routers that look at one token at a time, without jitter and capacity; one machine, one number of
    threads, eager mode or `torch.compile` with a backend that runs torch's own kernels. Inductor generates code for
    elementwise work that may differ with the size. It was verified on one x86 CPU (AMD, AVX-512). On accelerators the
    same algorithm runs, but nothing was verified there: not that their libraries give a row the same bits at each place
    of a block, nor how `topk` breaks ties in batches of different sizes.

    It is in force in the thread that opens it. Layers whose experts have no such way of computing refuse. Activation
    checkpointing repeats a forward in backward, which an accelerator runs in a thread of its own, and torch then
    raises: give `checkpoint` `context_fn=lambda: (batch_invariant(), batch_invariant())`.

    Raises:
        InputError: opened inside a compiled function.
    """
    if torch.compiler.is_compiling():
        raise InputError("batch_invariant() can't be opened inside a compiled function: open it around the call")
    before = _mode.on
    _mode.on = True
    try:
        yield
    finally:
        _mode.on = before


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)` for a function of each row of `x` `[rows, width]`, with the same bits wherever a row lies.

    On the CPU, torch computes most elements with vector instructions and those at the end of a piece without, and
    their exponentials differ in the last bit. Rows that don't adjoin in memory are each a piece of their own, unless
    threads share the work, which they don't in small parts.
    """
    if x.device.type != "cpu":
        return function(x)
    # One row more, since a part of a single row would count as contiguous, for which gelu has another kernel.
    apart = F.pad(x, (0, 1, 0, 1))[:, :-1]
    rows = max(1, (_ONE_PIECE - 1) // x.shape[1])
    return torch.cat([function(part) for part in apart.split(rows)])[:-1]


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function(x)`, inside of `batch_invariant()` by rows."""
    return by_rows(function, x) if _mode.on else function(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, inside of `batch_invariant()` in blocks."""
    return invariant_linear(x, weight, bias) if _mode.on else F.linear(x, weight, bias)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` in blocks of 32 rows, so that a row's result depends on that row alone.

    Memory is bounded: besides the output, a padded copy of `x` and one block. Differentiable, any number of times;
    the gradient of `x` has the same property. Autocast does not reach inside.

    Args:
        x: `[rows, K]`.
        weight: `[N, K]` of x's dtype.
        bias: `[N]`.

    Returns:
        `[rows, N]` of x's dtype.

    Raises:
        InputError: a shape or dtype does not fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype is not weight.dtype:
        raise InputError(
            "invariant_linear: x must be [rows, K] and weight [N, K] of one dtype; "
            f"got {x.dtype} {list(x.shape)} and {weight.dtype} {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"invariant_linear: bias must be [{weight.shape[0]}]; got {list(bias.shape)}")
    rows = (x.shape[0] + BLOCK - 1) // BLOCK * BLOCK
    ends = torch.full((1,), rows, dtype=torch.int32, device=x.device)
    padded = F.pad(x, (0, 0, 0, rows - x.shape[0]))
    out: Tensor = _BlockMM.apply(padded, weight.t().unsqueeze(0), ends)[: x.shape[0]]  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


def invariant_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    *,
    activation: str = "swiglu",
) -> Tensor:
    """What `moe.experts` computes, a token's result and gradient depending on that token and its routing alone.

    Each expert's rows are padded to blocks of 32, so that every matrix product has the same shape, and the results of
    a token are summed in the order of its choices. The number of blocks follows from shapes; nothing is read on the
    host of an accelerator, where one expert's matrix is copied for each block. Saves every intermediate result.

    Args:
        x: `[tokens, hidden_size]`.
        top_k_index: `[tokens, K]`; ids that are negative or at and above the number of experts contribute nothing.
        top_k_weights: `[tokens, K]`.
        gate_up_proj: `[num_experts, width, hidden_size]`.
        down_proj: `[num_experts, hidden_size, intermediate_size]`.
        gate_up_proj_bias: `[num_experts, width]`.
        down_proj_bias: `[num_experts, hidden_size]`.
        activation: as in `moe.experts`.

    Returns:
        `[tokens, hidden_size]` of x's dtype.

    Raises:
        InputError: as in `moe.experts`.
        UnknownNameError: as in `moe.experts`.
    """
    tensors = (x, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias)
    call = converted(experts, experts.bind(*tensors, activation=activation))
    check_experts(call)
    with without_autocast(x.device.type):
        return _experts(call)


def _experts(call: Call) -> Tensor:
    x, index, weights, up, down, up_bias, down_bias = call[:7]
    top_k = index.shape[1]
    source, slot, ends = _blocks(index, up.shape[0])
    # Stacked rather than expanded or indexed: autograd then adds up a token's gradients one by one, in fixed order.
    pairs = torch.stack((x,) * top_k, dim=1).flatten(0, 1)
    rows = _Take.apply(pairs, source, slot)  # type: ignore[no-untyped-call]
    expert = expert_of_rows(ends, rows.shape[0])
    h = _BlockMM.apply(rows, up.mT, ends)  # type: ignore[no-untyped-call]
    if up_bias is not None:
        h = h + up_bias[expert]
    y = _BlockMM.apply(by_rows(activation_of(call), h), down.mT, ends)  # type: ignore[no-untyped-call]
    if down_bias is not None:
        y = y + down_bias[expert]
    wide = torch.promote_types(x.dtype, torch.float32)
    given = _Take.apply(y, slot, source).view(*index.shape, x.shape[1]).to(wide)  # type: ignore[no-untyped-call]
    known = (index >= 0) & (index < up.shape[0])
    factors = torch.where(known, weights, 0).to(wide).unsqueeze(-1)
    total: Tensor = given[:, 0] * factors[:, 0]
    for choice in range(1, top_k):
        total = total + given[:, choice] * factors[:, choice]
    return total.to(x.dtype)


def _blocks(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give every (token, choice) pair a row such that each expert's rows fill whole blocks.

    Returns:
        The pair of each row, `pairs` for none; the row of each pair, `rows` for none; and the end row of each expert.
    """
    pairs = index.numel()
    rows = BLOCK * min(pairs, pairs // BLOCK + num_experts)
    order, offsets = sort_by_expert(index, num_experts)
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    ends = padded.cumsum(0, dtype=torch.int32)
    shift = (ends - padded) - (offsets - counts)
    place = torch.arange(pairs, device=index.device)
    there = place + shift[expert_of_rows(offsets, pairs)]
    there = torch.where(place < offsets[-1:], there, rows)
    slot = torch.empty_like(order).scatter_(0, order, there)
    source = torch.full((rows + 1,), pairs, dtype=torch.int64, device=index.device).scatter_(0, there, order)[:rows]
    return source, slot, ends


class _Take(torch.autograd.Function):
    """Rows `x[index]`, zeros where `index` is past the end; `back` is where each row of `x` went."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(index, back)
        return F.pad(x, (0, 0, 0, 1)).index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        index, back = ctx.saved_tensors
        return _Take.apply(grads[0], back, index), None, None  # type: ignore[no-untyped-call]


class _BlockMM(torch.autograd.Function):
    """Op `kpt_moe::block_mm`: `moe.grouped_mm` for experts that own whole blocks of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return torch.ops.kpt_moe.block_mm.default(x, weight, ends)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = _BlockMM.apply(grad, weight.mT, ends) if ctx.needs_input_grad[0] else None  # type: ignore[no-untyped-call]
        grad_weight = wgrad_like(weight, x, grad, ends) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


_library = torch.library.Library("kpt_moe", "FRAGMENT")
_library.define("block_mm(Tensor x, Tensor weight, Tensor ends) -> Tensor")


@torch.library.impl(_library, "block_mm", "CPU")
def _block_mm_on_host(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    def owners() -> Iterator[tuple[Tensor, range]]:
        for expert, start, end in segments(ends):
            yield _padded(weight[expert]), range(start, end, BLOCK)

    return _products(x, weight.shape[2], owners())


@torch.library.impl(_library, "block_mm", "CompositeExplicitAutograd")
def _block_mm_elsewhere(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    starts = torch.arange(0, x.shape[0], BLOCK, device=x.device)
    expert = torch.searchsorted(ends, starts, right=True).clamp_(max=weight.shape[0] - 1)

    def owners() -> Iterator[tuple[Tensor, range]]:
        for block, start in enumerate(range(0, x.shape[0], BLOCK)):
            yield _padded(weight.index_select(0, expert[block : block + 1])[0]), range(start, start + BLOCK, BLOCK)

    return _products(x, weight.shape[2], owners())


@torch.library.register_fake("kpt_moe::block_mm", lib=_library)  # type: ignore[untyped-decorator]
def _block_mm_fake(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _products(x: Tensor, columns: int, owners: Iterator[tuple[Tensor, range]]) -> Tensor:
    """For each padded matrix, multiply the blocks that start at the rows named; zeros elsewhere."""
    out = x.new_zeros(x.shape[0], columns)
    with torch.no_grad():
        # Both sides of every product lie in the same memory: alignment, too, decides on kernels.
        block = x.new_zeros(BLOCK, x.shape[1] + -x.shape[1] % _MULTIPLE)
        product = x.new_empty(BLOCK, columns + -columns % _MULTIPLE)
        for matrix, starts in owners:
            for start in starts:
                block[:, : x.shape[1]] = x[start : start + BLOCK]
                torch.mm(block, matrix, out=product)
                out[start : start + BLOCK] = product[:, :columns]
    return out


def _padded(matrix: Tensor) -> Tensor:
    """`[K, N]` with both sizes multiples, in place if they are."""
    rows, columns = matrix.shape
    if rows % _MULTIPLE == 0 and columns % _MULTIPLE == 0:
        return matrix
    return F.pad(matrix, (0, -columns % _MULTIPLE, 0, -rows % _MULTIPLE))
