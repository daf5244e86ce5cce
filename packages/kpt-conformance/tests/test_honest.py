"""The suite finds nothing in kernels that are right, whoever wrote them."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import honest
import honest_fp8
import honest_others as others
import kpt_core
from kpt_conformance.checks import declarations
from kpt_conformance.checks.catalog import CHECKS
from kpt_conformance.extent import extent_of
from kpt_conformance.loopback import Loopback
from kpt_conformance.subject import Subject
from kpt_conformance.suite import trials
from kpt_core import Call, Refusal
from kpt_optimize.cases import case_tables
from mutants import fp8
from scaled_mm import SCALED_MM

CHECK = {check.__name__: check for check in CHECKS}
TABLES = {**case_tables(), SCALED_MM.op: SCALED_MM}


def _picky(call: Call) -> Refusal | str | None:
    """A kernel may refuse by sizes and by strides."""
    if call.x.shape[0] % 2:
        return Refusal("needs an even number of rows, not {rows}", rows=call.x.shape[0])
    return None if call.weight.is_contiguous() and call.weight.stride(0) < 2**31 // 8 else "needs a contiguous weight"


@dataclass(frozen=True)
class Honest:
    """A right kernel, and how it is offered."""

    op: str
    make: Callable[[], tuple[honest.Function, ...]]
    offer: dict[str, Any] = field(default_factory=dict)


BY_AUTOGRAD = {"differentiable": True}
HONEST = {
    "halves of K": Honest("moe.grouped_mm", honest.grouped_mm_of),
    "picky": Honest("moe.grouped_mm", honest.grouped_mm_of, {"unsupported": _picky, "dtypes": {"bfloat16"}}),
    "forward only": Honest("moe.grouped_mm", lambda: honest.grouped_mm_of()[:1]),
    "padded to tiles": Honest(
        "moe.grouped_mm",
        lambda: honest.grouped_mm_of(
            others.padded_product,
            lambda grad, weight, offsets: others.split_product(grad, weight.mT, offsets),
            others.scattered_wgrad,
        ),
    ),
    "dense einsum": Honest("moe.grouped_mm", lambda: (others.dense_grouped_mm,), BY_AUTOGRAD),
    "scattered wgrad": Honest("moe.grouped_mm_wgrad", others.wgrad),
    "dense experts": Honest("moe.experts", lambda: (honest.Experts(),), BY_AUTOGRAD),
    "sorted experts": Honest("moe.experts", lambda: (others.sorted_experts,), BY_AUTOGRAD),
    "textbook softmax": Honest("moe.top_k_gating", lambda: (others.gating, others.gating_backward)),
    "logsumexp": Honest("moe.top_k_gating", lambda: (others.logsumexp_gating,), BY_AUTOGRAD),
    "split K of scaled": Honest(
        "moe.scaled_grouped_mm", lambda: (others.scaled_product, others.scaled_product_backward)
    ),
    "8-bit numbers by a table": Honest("fp8.dequantize", lambda: (honest_fp8.dequantize_by_table,)),
    "8-bit products by blocks": Honest("fp8.scaled_mm", lambda: (honest_fp8.scaled_mm_by_blocks,)),
    "8-bit weight in float64": Honest(
        "fp8.linear", lambda: (honest_fp8.linear_in_float64, honest_fp8.linear_in_float64_backward)
    ),
    "8-bit numbers step by step": Honest("fp8.quantize", lambda: fp8.right("fp8.quantize")),
    "scaled_mm": Honest("sample.scaled_mm", lambda: (honest.scaled_mm, honest.scaled_mm_backward)),
}


#: Trials of a check on a kernel where a few must do.
FEW = 10
#: Checks of numbers: each hand rounds in its own way. What else there is differs little between kernels of one op.
NUMBERS = {
    "values",
    "derivatives",
    "magnitudes",
    "cotangents",
    "nans",
    "padding",
    "statistics",
    "second_derivatives",
    "layouts",
}
FIRST = {right.op: name for name, right in reversed(HONEST.items())}


def judgements() -> Iterator[Any]:
    """Pair kernels with checks; those that seldom tell anything new are slow."""
    for name, right in HONEST.items():
        for check in (*CHECK, "declaration"):
            few = FIRST[right.op] == name or check in NUMBERS
            yield pytest.param(name, check, "few", id=f"{name}-{check}", marks=() if few else pytest.mark.slow)
            yield pytest.param(name, check, "all", id=f"{name}-{check}-all", marks=pytest.mark.slow)


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    with Loopback("planted", capabilities={"bf16"}) as backend:
        yield backend


@pytest.mark.parametrize(("name", "check", "extent"), list(judgements()))
def test_nothing_is_found_in_a_right_kernel(loopback: Loopback, name: str, check: str, extent: str) -> None:
    right = HONEST[name]
    kernel = loopback.offer(right.op, *right.make(), **right.offer)
    subject = Subject(kpt_core.get_op(kernel.op), kernel.forward, loopback.name, torch.device("cpu"), kernel)
    if check == "declaration":
        declarations.declaration(subject, TABLES[right.op])
        return
    # The kernels are slow.
    tried = [
        trial
        for trial in trials(subject, TABLES[right.op], extent_of(CHECK[check]))
        if not trial.case.model and (check == "values" or not trial.case.drawn)
    ]
    if extent == "few":
        tried = sorted(tried, key=lambda trial: zlib.crc32(f"{trial.case.name} {trial.dtype}".encode()))[:FEW]
    found = []
    for trial in tried:
        try:
            CHECK[check](trial)
        except pytest.skip.Exception:
            pass
        except Exception as error:
            found.append(f"{trial.case.name}, {trial.dtype}: {type(error).__name__}: {error}")
    assert "\n".join(found) == ""


def test_there_are_right_kernels_of_other_hands_for_all_ops() -> None:
    ours = [right.op for right in HONEST.values() if right.op in case_tables()]
    assert sum(op.startswith("moe.") for op in ours) >= 10
    assert set(ours) == {op for op in case_tables() if op.startswith(("moe.", "fp8."))}
