"""Faults in products of quantised weights: `moe.scaled_grouped_mm`, and the suite's own `sample.scaled_mm`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import honest
import kpt_core

from .grouped_mm import as_if_contiguous, past
from .mutant import Mutant

MUTANTS: list[Mutant] = []
_op = kpt_core.get_op("moe.scaled_grouped_mm")


def fault(name: str, found_by: str = "values", at: Any = "small") -> Callable[[Callable[[Any], Any]], None]:
    """Enter a mutant that computes what the reference does of another call: the decorated function changes it.

    `at` may be a part of a case's name.
    """

    def enter(change: Callable[[Any], Any]) -> None:
        likely = (lambda trial: at in trial.case.name) if isinstance(at, str) else at
        MUTANTS.append(
            Mutant(
                name,
                "moe.scaled_grouped_mm",
                found_by,
                lambda: (lambda call: _op.run_reference(change(call)),),
                {"differentiable": True},
                likely,
            )
        )

    return enter


@fault("e5m2 is read as e4m3", at="e5m2")
def _(call):
    if call.weight.dtype is not torch.float8_e5m2:
        return call
    return call._replace(weight=call.weight.view(torch.float8_e4m3fn))


@fault("an x of e5m2 is read as e4m3", at="e5m2 x")
def _(call):
    return call._replace(x=call.x.view(torch.float8_e4m3fn)) if call.x.dtype is torch.float8_e5m2 else call


@fault("scales pass through bfloat16")
def _(call):
    return call._replace(scale=call.scale.bfloat16().float())


@fault("every block has the scale of its column's first one", at="blocks")
def _(call):
    return call._replace(scale=call.scale[:, :1].expand(call.scale.shape)) if call.scale.dim() == 3 else call


@fault("a last block that is not whole has the scale of the one before", at="blocks")
def _(call):
    if call.scale.dim() < 3 or call.scale.shape[2] < 2 or call.weight.shape[2] % 128 == 0:
        return call
    return call._replace(scale=torch.cat((call.scale[..., :-1], call.scale[..., -2:-1]), -1))


@fault("scales of input channels are taken for one of the expert", at="input channels")
def _(call):
    column = call.scale.dim() == 3 and call.scale.shape[1] == call.weight.shape[1] > 1
    return call._replace(scale=call.scale[:, :1].expand(call.scale.shape)) if column else call


@fault("scales of x count for the first block alone", at="8-bit x, square")
def _(call):
    many = call.x_scale is not None and call.x_scale.shape[1] > 1
    return call._replace(x_scale=call.x_scale[:, :1].expand(call.x_scale.shape)) if many else call


@fault("scales of x are those of the row before", at="8-bit x")
def _(call):
    return call if call.x_scale is None else call._replace(x_scale=call.x_scale.roll(1, 0))


@fault("matrices stored as NK are read as KN where they are square", found_by="layouts")
def _(call):
    return call._replace(weight=as_if_contiguous(call.weight))


@fault("groups past the thirty-second have no rows", at=past(groups=32))
def _(call):
    ends = call.offsets.clone()
    ends[32:] = ends[31] if len(ends) > 32 else 0
    return call._replace(offsets=ends)


@fault("a floating x is rounded to e4m3 first")
def _(call):
    if call.x.dtype.itemsize == 1:
        return call
    return call._replace(x=call.x + (call.x.to(torch.float8_e4m3fn).to(call.x.dtype) - call.x).detach())


def _rounded_first(call: Any) -> Any:
    out = _op.run_reference(call)
    return out.bfloat16().to(out.dtype) if call.x.dtype.itemsize == 1 else out


def _ignores_out_dtype(call: Any) -> Any:
    out = _op.run_reference(call)
    return out if call.x.dtype.itemsize == 1 else out.to(call.x.dtype)


def _of_result(name: str, found_by: str, forward: Callable[[Any], Any], at: Any) -> None:
    offer = {"differentiable": True}
    MUTANTS.append(Mutant(name, "moe.scaled_grouped_mm", found_by, lambda: (forward,), offer, at))


_of_result(
    "a result of 8-bit rows is rounded to bfloat16 first",
    "values",
    _rounded_first,
    lambda t: "8-bit x" in t.case.name,
)
_of_result(
    "out_dtype counts for 8-bit rows alone",
    "values",
    _ignores_out_dtype,
    lambda t: t.case.drawn and t.case.sizes.get("out_dtype") == "float32" and not t.case.sizes.get("x_scales"),
)


def _scaled(
    name: str,
    forward: Callable[[Any], Any] = honest.scaled_mm,
    backward: honest.Function = honest.scaled_mm_backward,
    found_by: str = "values",
) -> None:
    MUTANTS.append(Mutant(name, "sample.scaled_mm", found_by, lambda: (forward, backward)))


def _exchanged(call: Any) -> Any:
    square = call.x_scale.shape == call.weight_scale.shape
    return honest.scaled_mm(call._replace(x_scale=call.weight_scale, weight_scale=call.x_scale) if square else call)


_scaled("the scales are exchanged where the matrix is square", _exchanged)
_scaled(
    "every row has the first one's scale",
    lambda call: honest.scaled_mm(call._replace(x_scale=call.x_scale[:1].expand(call.x_scale.shape))),
)
_scaled(
    "scales are rounded to bfloat16",
    lambda call: honest.scaled_mm(call._replace(x_scale=call.x_scale.bfloat16().float())),
)


def _saving(change: Callable[[Tensor], Tensor]) -> honest.Function:
    """Forward that saves something else than the scaled rows."""

    def forward(call: Any) -> Any:
        out, saved = honest.scaled_mm(call)
        return out, tuple(map(change, saved))

    return forward


_scaled(
    "a workspace is kept beside what is saved",
    _saving(lambda rows: torch.cat((rows, rows, rows))[: rows.shape[0]]),
    found_by="saved_tensors",
)
_scaled(
    "what is saved means something else than the op declares",
    _saving(lambda rows: -rows),
    lambda call, saved, grad: honest.scaled_mm_backward(call, (-saved[0],), grad),
    "interchangeable",
)


def _consuming(call: Any, saved: tuple[Tensor], grad: Tensor) -> dict[str, Tensor]:
    made = honest.scaled_mm_backward(call, saved, grad)
    saved[0].mul_(0.5)
    return made


_scaled("backward changes what was saved", backward=_consuming, found_by="double_use")


def _saves_always(call: Any) -> Any:
    out, _ = honest.scaled_mm(call)
    return out, honest.scaled_mm(call._replace(needs=("x",)))[1]


_scaled("it saves for backward where no gradient is wanted", _saves_always, found_by="interchangeable")
