"""A training step that fits: the fastest level of checkpointing that a device has memory for, and what else helps."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from kpt_core.errors import InputError
from kpt_optimize.rewrite import check_model

from .checkpoint import LEVELS, checkpoint_blocks, find_blocks
from .device_memory import room_for
from .estimate import MemoryEstimate, OptimizerFactory, estimate_with_flops
from .sizes import format_bytes

#: Of an optimiser with states of 8 bits: a float32 scale for each block, and tensors that stay as they are
#: (`torchao.optim.AdamW8bit`, as bitsandbytes before it).
_BLOCK, _SMALL = 256, 4096


@dataclass(frozen=True, slots=True)
class LevelEstimate:
    """Tell what a level of `checkpoint_blocks` takes.

    Attributes:
        level: one of `LEVELS`.
        memory: of a step.
        flops: floating-point operations of products and attention, over those of the level `none`; 1.33 is a forward
            pass more.
    """

    level: str
    memory: MemoryEstimate
    flops: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Tell what `fit` chose.

    Attributes:
        level: that the model has now.
        levels: all of them.
        memory: bytes that were to hold a step.
    """

    level: str
    levels: tuple[LevelEstimate, ...]
    memory: int

    def __str__(self) -> str:
        rows = [
            f"{'* ' if each.level == self.level else '  '}{each.level:9} {format_bytes(each.memory.activations):>12}"
            f" {format_bytes(each.memory.peak):>12} {each.flops:6.2f}"
            for each in self.levels
        ]
        head = f"  {'level':9} {'activations':>12} {'peak':>12} {'flops':>6}"
        return "\n".join([head, *rows, f"room: {format_bytes(self.memory)}"])


def compare_levels(
    model: nn.Module,
    example_inputs: Any,
    *,
    optimizer: str | OptimizerFactory | None = "adamw",
    blocks: bool | Iterable[type[nn.Module]] = True,
) -> tuple[LevelEstimate, ...]:
    """Estimate a training step at each level of `checkpoint_blocks`; nothing runs, and the model ends without one.

    The arguments and errors are those of `fit`.
    """
    blocks = blocks if isinstance(blocks, bool) else tuple(blocks)
    found: list[tuple[str, MemoryEstimate, int]] = []
    try:
        for level in LEVELS:
            checkpoint_blocks(model, level, blocks)
            found.append((level, *estimate_with_flops(model, example_inputs, True, optimizer)))
    finally:
        checkpoint_blocks(model, "none", blocks)
    return tuple(LevelEstimate(level, memory, flops / (found[0][2] or 1)) for level, memory, flops in found)


def fit(
    model: nn.Module,
    example_inputs: Any,
    *,
    memory: int | None = None,
    optimizer: str | OptimizerFactory | None = "adamw",
    blocks: bool | Iterable[type[nn.Module]] = True,
) -> Fit:
    """Make a training step fit: give the model the level of checkpointing that computes the least again and fits.

    Gradients stay the same, to the bit where kernels give the same bits twice.

    Args:
        model: changed in place, as `checkpoint_blocks` does.
        example_inputs: of a step: a tensor, a tuple of arguments or a dict of keyword arguments. An output with a
            `loss` is differentiated from there.
        memory: bytes that may be taken; None is what the model's device has, less the margin of 5% that
            `DeviceMemoryManager` keeps free.
        optimizer: as in `estimate`.
        blocks: as in `checkpoint_blocks`.

    Raises:
        InputError: no level fits; the message says what is missing, and what else would help. The model is as before.
        UnknownNameError: no such optimiser.

    Examples:
        >>> block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> model = nn.Sequential(block, nn.Linear(64, 8))
        >>> fit(model, torch.randn(512, 64), memory=1 << 20, blocks=[nn.Sequential]).level
        'full'
    """
    check_model(model)
    blocks = blocks if isinstance(blocks, bool) else tuple(blocks)
    room = room_for(model) if memory is None else memory
    levels = compare_levels(model, example_inputs, optimizer=optimizer, blocks=blocks)
    fitting = [each for each in levels if each.memory.peak <= room]
    if not fitting:
        least = min(levels, key=lambda each: each.memory.peak)
        missing = format_bytes(least.memory.peak - room)
        helps = "; ".join(remedies(model, least.memory, room, blocks))
        raise InputError(
            f"fit: a step of {type(model).__name__} takes {format_bytes(least.memory.peak)} at level {least.level!r}, "
            f"{missing} more than {format_bytes(room)}. What else helps: {helps}"
        )
    best = min(fitting, key=lambda each: each.flops)  # of equals the first, which saves most
    checkpoint_blocks(model, best.level, blocks)
    return Fit(best.level, levels, room)


def remedies(
    model: nn.Module, least: MemoryEstimate, room: int, blocks: bool | Iterable[type[nn.Module]] = True
) -> list[str]:
    """Return what else makes a step smaller, by the names that torch and torchao have for it, with the peak it leaves.

    Args:
        model: the model.
        least: the smallest estimate of a step, with the optimiser's state.
        room: bytes that are to hold it.
        blocks: as in `checkpoint_blocks`; they are what FSDP holds at a time.
    """
    found = []

    def add(text: str, peak: int) -> None:
        found.append(f"{text}: {format_bytes(peak)}{'' if peak <= room else ', not enough alone'}")

    state8 = sum(state_bytes_8bit(each.numel(), each.itemsize) for each in model.parameters() if each.requires_grad)
    if least.optimizer_state > state8:
        add("8-bit states (torchao.optim.AdamW8bit)", least.peak - least.optimizer_state + state8)
    if least.optimizer_state:
        add(
            "states and gradients in main memory (torchao.optim.CPUOffloadOptimizer, offload_gradients=True)",
            least.peak - least.optimizer_state - least.gradients,
        )
    largest = _largest(model, blocks)
    held = least.parameters + least.gradients + least.optimizer_state
    if 4 * largest < held:  # of two blocks at a time, with their gradients
        add(
            "parameters too (torch.distributed.fsdp.fully_shard of each block, offload_policy=CPUOffloadPolicy())",
            least.peak - held + 4 * largest,
        )
    rest = least.peak - held - least.buffers
    if rest > 0 and (share := (room - least.peak + rest) / rest) > 0:
        found.append(f"a batch of about {share:.0%} of it")
    return [*found, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, against fragments, which no estimate knows"]


def state_bytes_8bit(count: int, itemsize: int) -> int:
    """Return the bytes of AdamW's two states in 8 bits for a parameter of `count` elements of `itemsize` bytes.

    Tensors of fewer than 4,096 elements, or of no multiple of 256, keep the parameter's dtype.
    """
    if count < _SMALL or count % _BLOCK:
        return 2 * count * itemsize
    return 2 * (count + count // _BLOCK * 4)


def _largest(model: nn.Module, blocks: bool | Iterable[type[nn.Module]]) -> int:
    """Return the bytes of the largest block, or of the largest parameter outside of blocks."""
    parts = list(find_blocks(model, blocks).values())
    inside = {id(each) for part in parts for each in part.parameters()}
    outside = [each.nbytes for each in model.parameters() if id(each) not in inside]
    return max([sum(each.nbytes for each in part.parameters()) for part in parts] + outside, default=0)
