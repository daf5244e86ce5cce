"""Checks of ops rather than of kernels find their faults; and how subjects are chosen."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import honest
import kpt_core
from kpt_conformance.checks import declarations, results, transforms, values
from kpt_conformance.comparison import Outcome, assert_right
from kpt_conformance.loopback import Loopback
from kpt_conformance.suite import CHECKS, device_of, subjects, trials
from kpt_conformance.trial import REFERENCE, Subject, Trial
from scaled_mm import SCALED_MM, scaled_mm

TABLES = {**kpt_core.case_tables(), SCALED_MM.op: SCALED_MM}


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    with Loopback("planted") as backend:
        yield backend


def trial_of(op: kpt_core.Op[..., Any] | str, table: kpt_core.CaseTable) -> Trial:
    """Of a reference, or of the only kernel there is if the op is named by a string."""
    if isinstance(op, str):
        (subject,) = (subject for subject, _ in subjects("planted") if subject.op.name == op)
    else:
        subject = Subject(op, REFERENCE, REFERENCE, torch.device("cpu"))
    return Trial(subject, table, table.cases[0], torch.float32)


def with_reference(op: kpt_core.Op[..., Any], reference: Callable[..., Any]) -> Trial:
    """A trial of an op with another body."""
    return trial_of(kpt_core.Op(op.name, reference), TABLES[op.name])


class _HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / 2


def test_a_wrong_gradient_of_a_reference_is_found() -> None:
    grouped_mm = kpt_core.get_op("moe.grouped_mm")

    def reference(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        out: Tensor = grouped_mm.reference(_HalfGradient.apply(x), weight, offsets)
        return out

    values.derivatives(with_reference(grouped_mm, grouped_mm.reference))
    with pytest.raises(RuntimeError, match="Jacobian"):
        values.derivatives(with_reference(grouped_mm, reference))


def test_a_reference_that_is_wrong_on_meta_is_found() -> None:
    def reference(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
        return scaled_mm.reference(x, weight, x_scale, weight_scale).to(torch.float16 if x.is_meta else x.dtype)

    trial = with_reference(scaled_mm, reference)
    with pytest.raises(AssertionError, match="float16"):
        results.meta_result(trial)


def test_an_op_that_autocast_does_not_convert_is_found(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    loopback.offer("moe.experts", honest.Experts())
    trial = trial_of("moe.experts", TABLES["moe.experts"])
    transforms.autocast(trial)
    monkeypatch.setattr(kpt_core.Op, "_convert", lambda op, args, kwargs: (args, kwargs))
    with pytest.raises(AssertionError, match="float32 under autocast; expected"):
        transforms.autocast(trial)


def test_the_sign_of_infinity_matters() -> None:
    def outcome(last: float) -> Outcome:
        return Outcome({"result": torch.tensor([1.0, 2.0, last])}, {})

    infinity = float("inf")
    assert_right(outcome(infinity), outcome(infinity), outcome(infinity))
    with pytest.raises(
        AssertionError, match=r"^here: result: 1 of 3 elements are NaN or infinite .* at \[2\]: -inf, expected inf"
    ):
        assert_right(outcome(-infinity), outcome(infinity), outcome(infinity), "here")


def _twice(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return 2 * honest.product(x, weight, offsets)


def test_a_composite_op_is_tried_through_its_children(loopback: Loopback) -> None:
    experts = TABLES["moe.experts"]
    loopback.offer("moe.grouped_mm", honest.grouped_mm_of())
    trial = trial_of("moe.experts", experts)
    assert trial.subject.children == ("moe.grouped_mm",)
    values.values(trial)
    loopback.offer("moe.grouped_mm", honest.grouped_mm_of(_twice), priority=1)
    with pytest.raises(AssertionError, match="error"):
        values.values(trial)


def _is_contiguous(x: Tensor, weight: Tensor, offsets: Tensor) -> str | None:
    return "needs a transposed weight" if weight.is_contiguous() else None


def test_parts_may_refuse_what_backward_asks(loopback: Loopback) -> None:
    loopback.offer("moe.grouped_mm", honest.grouped_mm_of(), unsupported=_is_contiguous)
    trial = trial_of("moe.experts", TABLES["moe.experts"])
    with pytest.raises(pytest.skip.Exception, match=r"(?s)refused: .*needs a transposed weight"):
        values.values(trial)
    few = replace(trial.table, cases=trial.table.cases[:1])
    with pytest.raises(pytest.skip.Exception, match="the kernels of its parts refuse every case"):
        declarations.declaration(trial.subject, few)


def test_past_dispatch_a_kernel_still_refuses() -> None:
    table = TABLES["moe.grouped_mm"]
    with Loopback("planted", device_type="cuda") as backend:
        backend.offer(
            "moe.grouped_mm", honest.grouped_mm_of(_twice), unsupported=lambda x, weight, offsets: "wants other rows"
        )
        ((subject, _),) = ((s, t) for s, t in subjects("planted", "cpu") if s.kernel)
    assert subject.direct
    with pytest.raises(pytest.skip.Exception, match="wants other rows"):
        values.values(Trial(subject, table, table.cases[0], torch.float32))
    with pytest.raises(AssertionError, match="it refuses every case"):
        declarations.declaration(subject, table)


def test_a_kernel_of_no_dtype_of_the_table_is_said(loopback: Loopback) -> None:
    loopback.offer("moe.grouped_mm", honest.grouped_mm_of(), dtypes={"int8"})
    trial = trial_of("moe.grouped_mm", TABLES["moe.grouped_mm"])
    with pytest.raises(AssertionError, match="it takes none of the dtypes"):
        declarations.declaration(trial.subject, trial.table)


def test_devices_are_named_as_tensors_name_them() -> None:
    assert [str(device_of(name)) for name in ("cpu", "cpu:0", "cuda", "cuda:1")] == ["cpu", "cpu", "cuda:0", "cuda:1"]
    with pytest.raises(kpt_core.InputError, match="'gpu' is no device"):
        device_of("gpu")


def test_every_check_has_trials() -> None:
    table = TABLES["moe.grouped_mm"]
    trial = trial_of(kpt_core.get_op(table.op), table)
    for check in CHECKS:
        assert any(trials(trial.subject, replace(table, cases=table.cases[:1]), check.kpt_extent)), check.__name__  # type: ignore[attr-defined]
