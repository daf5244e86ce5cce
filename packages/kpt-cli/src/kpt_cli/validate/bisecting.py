"""Find the modules that go wrong by themselves: each is fed what the recorder fed it, so that no error travels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .arms import Arm
from .bounds import Rounding
from .judging import Verdict, judge
from .recording import Tell, call_of, observe, silent
from .steering import forcing
from .trace import Call, Layer, Trace
from .weights import check_same_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A module that goes wrong although it is fed right.

    Attributes:
        verdict: its errors against float64 on the same inputs, and the bound.
        inputs: shapes and dtypes of the tensors that it took.
    """

    verdict: Verdict
    inputs: tuple[str, ...]

    @property
    def path(self) -> tuple[str, ...]:
        """The modules that it lies in, from outside to itself."""
        parts = self.verdict.key.split(".")
        return tuple(".".join(parts[: end + 1]) for end in range(len(parts)))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self.verdict.as_dict() | {"inputs": list(self.inputs), "path": list(self.path)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """What a bisection found.

    Attributes:
        culprits: the modules that differ, in the order in which their calls end: of a block and what lies in it, the
            inner one comes first, and the block only if its own code differs too.
        compared: how many calls were compared.
    """

    culprits: tuple[Culprit, ...]
    compared: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"culprits": [culprit.as_dict() for culprit in self.culprits], "compared": self.compared}


def bisect(model: nn.Module, trace: Trace, *, arm: Arm | None = None, tell: Tell = silent) -> Bisection:
    """Compare every module with the recorder's on the recorder's inputs.

    The model runs once. Every module gets the recorded inputs, and hands on the recorded outputs, whatever it computed.
    So each is judged for what it does itself, and a block only for what it does between its children.

    Args:
        model: the recorded model, in the recorded dtype; it is put into evaluation mode.
        trace: what was recorded; `record` with the other arm makes one.
        arm: what serves experts and ops; KPT's kernels, chosen automatically, if None.
        tell: told how far it is.

    Raises:
        CliError: the model is another one, or does not run.
        KptError: the arm names what is not installed or can't run.
    """
    check_same_model(model, trace.about)
    model.eval()
    return Bisection(culprits=culprits_of(model, trace, arm or Arm(), tell), compared=len(trace.layers))


def culprits_of(
    model: nn.Module, trace: Trace, arm: Arm, tell: Tell, dtype: torch.dtype | None = None
) -> tuple[Culprit, ...]:
    """The modules that go wrong by themselves, of a model that was checked already.

    Args:
        model: the recorded model.
        trace: what was recorded.
        arm: what serves experts and ops.
        tell: told how far it is.
        dtype: what the model was converted to, if it was.
    """
    run = observe(
        model, call_of(trace, model, dtype), arm, forcing(trace.layers), tell, "each alone", len(trace.layers)
    )
    calls = {call.key: call for call in run.calls}
    recorded_dtype: torch.dtype = getattr(torch, trace.about.dtype)
    layers = {layer.key: layer for layer in trace.layers}
    found: list[tuple[int, Culprit]] = []
    begun = _begun(trace.layers)
    for position, layer in enumerate(trace.layers):
        call = calls.get(layer.key)
        around = layers.get(_around(layer.key, layers))
        if call is not None and around is not None and _comparable(call.inputs, layer.inputs, layer.handed):
            # What code between modules computes for a module, attention for its output projection, no module gives.
            before = replace(around, outputs=layer.inputs)
            caller = calls.get(around.key)
            verdict = _judge(before, call.inputs, layer.handed, recorded_dtype, caller)
            if not verdict.ok:
                verdict = replace(verdict, reason=f"what it hands to {layer.key}: {verdict.reason}")
                found.append((begun[layer.key], _culprit(verdict, around)))
        verdict = _judge(layer, None if call is None else call.outputs, layer.alone, recorded_dtype, call)
        if not verdict.ok or any(not flip.explained for flip in verdict.flips):
            found.append((position, _culprit(verdict, layer)))
    first: dict[str, Culprit] = {}
    for _, culprit in sorted(found, key=lambda item: item[0]):
        first.setdefault(culprit.verdict.key, culprit)  # a block may go wrong at each of its children, and by itself
    return tuple(first.values())


def _judge(
    layer: Layer, given: Sequence[Tensor] | None, exact: Sequence[Tensor], dtype: torch.dtype, call: Call | None
) -> Verdict:
    relative = Rounding().then(layer.lengths).relative(dtype)
    return judge(layer, given, exact, relative, () if call is None else call.kernels)


def _culprit(verdict: Verdict, layer: Layer) -> Culprit:
    return Culprit(verdict=verdict, inputs=tuple(map(_shape, layer.inputs)))


def _around(key: str, layers: Mapping[str, Layer]) -> str:
    """The nearest module around a call's that was recorded, which may skip containers."""
    path = key.partition("#")[0].rpartition(".")[0]
    while path and path not in layers:
        path = path.rpartition(".")[0]
    return path


def _begun(layers: Sequence[Layer]) -> dict[str, int]:
    """For each call, the position of the first one that ended after it began: of something in it, or its own."""
    first: dict[str, int] = {}
    for position, layer in enumerate(layers):
        path = layer.key
        while path not in first:
            first[path] = position
            path = path.rpartition(".")[0]
    return first


def _comparable(*sides: Sequence[Tensor]) -> bool:
    """Whether the same tensors were handed over: implementations may differ in masks and the like."""
    return all([x.shape for x in side] == [x.shape for x in sides[0]] for side in sides) and all(
        len({x.is_floating_point() for x in same}) == 1 for same in zip(*sides, strict=True)
    )


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
