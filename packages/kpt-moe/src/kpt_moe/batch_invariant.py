"""Routing and experts whose results for a token do not depend, in any bit, on the other tokens of the batch."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_core import InputError
from kpt_core.autocast import converted, without_autocast

from ._pairs import sum_in_order
from .activations import activation_of
from .experts import check_experts, experts
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


#: `MODE.on` says whether this thread is inside `batch_invariant()`.
MODE = _Mode()


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
    before = MODE.on
    MODE.on = True
    try:
        yield
    finally:
        MODE.on = before


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
    return by_rows(function, x) if MODE.on else function(x)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, inside of `batch_invariant()` in blocks."""
    return invariant_linear(x, weight, bias) if MODE.on else F.linear(x, weight, bias)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` in blocks of 32 rows, so that a row's result depends on that row alone.

    `x` is `[rows, K]`, and the weight of its dtype. Memory is bounded: besides the output, a padded copy of `x` and one
    block. Differentiable, any number of times; the gradient of `x` has the same property. Autocast does not reach
    inside.
    """
    rows = (x.shape[0] + BLOCK - 1) // BLOCK * BLOCK
    ends = torch.full((1,), rows, dtype=torch.int32, device=x.device)
    padded = F.pad(x, (0, 0, 0, rows - x.shape[0]))
    out: Tensor = _block_mm(padded, weight.t().unsqueeze(0), ends)[: x.shape[0]]
    return out if bias is None else out + bias


def invariant_experts(*tensors: Tensor | None, activation: str = "swiglu") -> Tensor:
    """What `moe.experts` computes, a token's result and gradient depending on that token and its routing alone.

    Each expert's rows are padded to blocks of 32, so that every matrix product has the same shape, and the results of
    a token are summed in the order of its choices. The number of blocks follows from shapes; nothing is read on the
    host of an accelerator, where one expert's matrix is copied for each block. Saves every intermediate result. Takes,
    gives and raises what `moe.experts` does.
    """
    call = converted(experts, experts.bind(*tensors, activation=activation))
    check_experts(call)
    x, index, weights, up, down, up_bias, down_bias = call[:7]
    with without_autocast(x.device.type):
        source, slot, ends = _blocks(index, up.shape[0])
        # Stacked rather than expanded or indexed: autograd then adds up a token's gradients one by one, in fixed order.
        pairs = torch.stack((x,) * index.shape[1], dim=1).flatten(0, 1)
        rows = _take(pairs, source)
        expert = expert_of_rows(ends, rows.shape[0])
        h = _block_mm(rows, up.mT, ends)
        if up_bias is not None:
            h = h + up_bias[expert]
        y = _block_mm(by_rows(activation_of(call), h), down.mT, ends)
        if down_bias is not None:
            y = y + down_bias[expert]
        given = _take(y, slot).view(*index.shape, x.shape[1])
        return sum_in_order(given, index, weights, up.shape[0]).to(x.dtype)


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


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows `x[index]`, zeros where `index` is past the end; none is taken twice, so that no gradients are summed."""
    return F.pad(x, (0, 0, 0, 1)).index_select(0, index)


@torch.library.custom_op("kpt_moe::block_mm", mutates_args=())
def _block_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`moe.grouped_mm` for experts that own whole blocks of rows."""
    rows, columns = x.shape[0], weight.shape[2]
    out = x.new_zeros(rows, columns)
    with torch.no_grad():
        # Both sides of every product lie in the same memory: alignment, too, decides on kernels.
        block = x.new_zeros(BLOCK, x.shape[1] + -x.shape[1] % _MULTIPLE)
        product = x.new_empty(BLOCK, columns + -columns % _MULTIPLE)
        for matrix, starts in (_on_host if x.device.type == "cpu" else _elsewhere)(weight, ends, rows):
            if matrix.shape != (block.shape[1], product.shape[1]):
                matrix = F.pad(matrix, (0, -columns % _MULTIPLE, 0, -x.shape[1] % _MULTIPLE))
            for start in starts:
                block[:, : x.shape[1]] = x[start : start + BLOCK]
                torch.mm(block, matrix, out=product)
                out[start : start + BLOCK] = product[:, :columns]
    return out


def _on_host(weight: Tensor, ends: Tensor, rows: int) -> Iterator[tuple[Tensor, range]]:
    for expert, start, end in segments(ends):
        yield weight[expert], range(start, end, BLOCK)


def _elsewhere(weight: Tensor, ends: Tensor, rows: int) -> Iterator[tuple[Tensor, range]]:
    """Each block's matrix, and where it starts; no value is read on the host."""
    owners = torch.searchsorted(ends, torch.arange(0, rows, BLOCK, device=ends.device), right=True)
    for block, owner in enumerate(owners.clamp_(max=weight.shape[0] - 1).split(1)):
        yield weight.index_select(0, owner)[0], range(block * BLOCK, (block + 1) * BLOCK, BLOCK)


@_block_mm.register_fake
def _block_mm_fake(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _block_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = _block_mm(grad, weight.mT, ends) if ctx.needs_input_grad[0] else None
    return grad_x, wgrad_like(weight, x, grad, ends) if ctx.needs_input_grad[1] else None, None


_block_mm.register_autograd(
    _block_mm_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
