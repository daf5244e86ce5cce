"""Which kernel ran where, recorded while the optimised model reads a prompt."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import kpt_core


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUse:
    """One op of one kind of module, and what served it.

    Attributes:
        modules: dotted paths of the modules that called it alike.
        op: name of the op.
        level: 0 if the module called it, 1 if that call's kernel did, and so on.
        kernel: what ran: a kernel's full name, or `reference`.
        backend: the kernel's, or `reference`.
        reasons: why nothing else ran.
    """

    modules: tuple[str, ...]
    op: str
    level: int
    kernel: str
    backend: str
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@torch.no_grad()
def kernels_used(model: nn.Module, tokens: Tensor) -> list[KernelUse]:
    """Run a model once and say which kernel served each op that it called.

    Args:
        model: the optimised model.
        tokens: `[batch, tokens]`.
    """
    calls: list[tuple[str, kpt_core.Selection]] = []
    handles = []
    with kpt_core.record() as log:
        for path, module in model.named_modules():
            if not path or not _has_parameters(module):
                continue

            def note(_: nn.Module, __: Any, ___: Any, path: str = path) -> None:
                # Modules end from the inside out, so what is new in the log was called by the first that ends.
                calls.extend((path, selection) for selection in log[len(calls) :])

            handles.append(module.register_forward_hook(note))
        try:
            model(input_ids=tokens, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
    return _grouped(calls)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _grouped(calls: list[tuple[str, kpt_core.Selection]]) -> list[KernelUse]:
    """One row for all modules that called an op alike, in the order of the first call."""
    modules: dict[tuple[str, int, str, str, tuple[str, ...]], dict[str, None]] = {}
    for path, selection in calls:
        for level, inner in _flat(selection):
            reasons = tuple(str(refusal) for refusal in inner.refusals)
            key = (inner.op, level, inner.kernel, inner.backend, reasons)
            modules.setdefault(key, {})[path] = None
    return [
        KernelUse(modules=tuple(paths), op=op, level=level, kernel=kernel, backend=backend, reasons=reasons)
        for (op, level, kernel, backend, reasons), paths in modules.items()
    ]


def _flat(selection: kpt_core.Selection, level: int = 0) -> Iterator[tuple[int, kpt_core.Selection]]:
    yield level, selection
    for child in selection.children:
        yield from _flat(child, level + 1)


def pattern(modules: Sequence[str]) -> str:
    """Paths that differ in one number as one path: `model.layers.{0-3}.mlp.experts`."""
    parts = [module.split(".") for module in modules]
    if len({len(part) for part in parts}) != 1:
        return ", ".join(modules)
    columns = list(zip(*parts, strict=True))
    varying = [index for index, column in enumerate(columns) if len(set(column)) > 1]
    if not varying:
        return modules[0]
    numbers = columns[varying[0]]
    if len(varying) > 1 or not all(number.isdecimal() for number in numbers):
        return ", ".join(modules)
    path = [column[0] for column in columns]
    path[varying[0]] = f"{{{_ranges(sorted(map(int, set(numbers))))}}}"
    return ".".join(path)


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as `0-3,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
