"""Selection, whatever is installed and whatever is asked for, against a model of its rules.

The model is `predict`: some thirty lines that know backends and settings as they were drawn, and nothing of how
`kpt_core` stores or caches them.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kpt_core
from kpt_conformance import fake_device
from kpt_conformance.loopback import Loopback
from kpt_core import FallbackWarning, Kernel, KernelFailedWarning, NoKernelError, Selection

PLAIN, WHOLE = "selection.plain", "selection.whole"
CAPABILITIES = ("bf16", "fp8", "tma")
DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "kptfake")
_INSIDE = 100


@kpt_core.op(PLAIN)
def plain(x: Tensor) -> Tensor:
    """Gives x back; a kernel adds its own number to it, which tells who ran."""
    return x + 0


@kpt_core.op(WHOLE)
def whole(x: Tensor) -> Tensor:
    """Adds a hundred; a kernel that is composed of the other op calls it, and adds its number."""
    return x + _INSIDE


class LaunchError(RuntimeError):
    """What a broken kernel raises."""


@dataclass
class Drawn:
    """A kernel as it was drawn, and where it came to be."""

    op: str
    requires: frozenset[str]
    priority: int
    dtypes: frozenset[str] | None
    most_rows: int | None
    gradients: str  # by "backward", by "autograd", or "none"
    composed: bool
    fails: bool
    number: int = 0
    backend: Loopback = field(default_factory=Loopback)
    target: str = ""

    def offer(self, backend: Loopback, number: int) -> None:
        self.backend, self.number = backend, number

        def function(call: kpt_core.Call) -> Tensor:
            if self.fails:
                raise LaunchError(f"{self.target} is broken")
            return (plain(call.x) if self.calls_plain else call.x) + number

        def backward(call: kpt_core.Call, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
            return {"x": grad}

        def unsupported(call: kpt_core.Call) -> kpt_core.Refusal | None:
            refusal = kpt_core.Refusal("at most {most} rows", most=self.most_rows)
            return refusal if len(call.x) > (self.most_rows or 0) else None

        function.__name__ = f"kernel_{number:02d}_"  # the order of equals must not depend on the tests before
        kernel: Kernel = backend.offer(
            self.op,
            function,
            backward if self.gradients == "backward" else None,
            requires=self.requires,
            priority=self.priority,
            dtypes=self.dtypes,
            unsupported=None if self.most_rows is None else unsupported,
            differentiable=self.gradients == "autograd",
            composed_of=(PLAIN,) if self.calls_plain else (),
        )
        self.target = kernel.forward

    @property
    def calls_plain(self) -> bool:
        return self.composed and self.op == WHOLE


@dataclass(frozen=True)
class Call:
    op: str
    rows: int
    dtype: str
    device: str
    gradient: bool

    def x(self) -> Tensor:
        return torch.zeros(self.rows, dtype=getattr(torch, self.dtype), device=self.device, requires_grad=self.gradient)


@dataclass(frozen=True)
class Asked:
    """The settings: pairs of op (or `*`) and choice, the innermost last."""

    choices: tuple[tuple[str, str], ...]
    disabled: frozenset[str]
    strict: bool


@dataclass
class Outcome:
    """What must happen, for an op or one that it calls."""

    ran: str | None = None  # a kernel's target, "reference", or None if nothing may run
    value: int | None = None
    raised_by: str | None = None
    broken: list[str] = field(default_factory=list)  # kernels that ran before and raised, in order
    refusals: dict[str, list[str]] = field(default_factory=dict)  # by target, every reason that applies
    slow: set[str] = field(default_factory=set)  # ops whose reference runs unasked on an accelerator
    child: "Outcome | None" = None

    @property
    def fails(self) -> bool:
        return self.ran is None or self.raised_by is not None or (self.child is not None and self.child.fails)

    def all(self) -> "list[Outcome]":
        return [self, *(self.child.all() if self.child else [])]


def _fixed(
    op: str, call: Call, asked: Asked, kernels: list[Drawn]
) -> tuple[str | None, list[Drawn], dict[str, list[str]]]:
    """What does not depend on shapes: the choice, the op's kernels in order, and who is refused why."""
    mine = sorted((k for k in kernels if k.op == op), key=lambda k: (-k.priority, k.backend.name, k.target))
    scope, choice = next(((o, c) for o, c in reversed(asked.choices) if o in ("*", op)), ("*", None))
    if scope == "*" and any(choice == k.target and k.op != op for k in kernels):
        choice = None  # it is no kernel of this op's
    refused: dict[str, list[str]] = {}
    for k in mine:
        device_lacks = k.requires - k.backend.capabilities(torch.device(call.device))
        reasons = {
            "was asked for": choice is not None and choice not in (k.backend.name, k.target),
            "disabled": bool({k.backend.name, k.target} & asked.disabled),
            "runs on": call.device not in k.backend.device_types,
            "broken today": not k.backend.ready,
            "needs " + ", ".join(sorted(device_lacks)): bool(device_lacks),
            "dtype " + call.dtype: k.dtypes is not None and call.dtype not in k.dtypes,
        }
        refused[k.target] = [reason for reason, applies in reasons.items() if applies]
    return choice, mine, refused


def predict(op: str, call: Call, asked: Asked, kernels: list[Drawn], *, breaks: bool, known: Counter[str]) -> Outcome:
    """The rules.

    Args:
        op: of the call, or the one that it calls.
        call: its arguments.
        asked: the settings.
        kernels: all that are offered.
        breaks: whether kernels run; `explain` runs none of a vendor, and so knows neither of failures nor of parts.
        known: how often kernels have failed before.
    """
    choice, mine, fixed = _fixed(op, call, asked, kernels)
    outcome = Outcome(refusals=fixed)
    for k in mine:
        if outcome.refusals[k.target]:
            continue
        reasons = {
            "forward only": k.gradients == "none" and call.gradient,
            "at most": k.most_rows is not None and call.rows > k.most_rows,
            "quarantined: it raised 3 times": known[k.target] >= 3,
        }
        outcome.refusals[k.target] = [reason for reason, applies in reasons.items() if applies]
        if outcome.refusals[k.target]:
            continue
        raised_by, child = k.target if k.fails and breaks else None, None
        if k.calls_plain and not k.fails and breaks:
            inside = replace(call, gradient=call.gradient and k.gradients == "autograd")
            child = predict(PLAIN, inside, asked, kernels, breaks=breaks, known=known)
            raised_by = child.raised_by
        if raised_by is None:
            outcome.ran, outcome.child = k.target, child
            if child is None or child.value is not None:
                outcome.value = k.number + (child.value or 0 if child else 0)
            break
        if asked.strict or choice is not None:
            outcome.ran, outcome.raised_by = k.target, raised_by
            break
        outcome.broken.append(k.target)
        outcome.refusals[k.target] = ["it raised LaunchError"]
    else:
        slow = call.device != "cpu" and choice is None
        if choice in (None, "reference") and not (slow and asked.strict):
            outcome.ran, outcome.slow = "reference", {op} if slow else set()
            outcome.value = _INSIDE if op == WHOLE else 0
    outcome.refusals = {target: reasons for target, reasons in outcome.refusals.items() if reasons}
    return outcome


def require_as_predicted(selection: Selection, outcome: Outcome, kernels: list[Drawn]) -> None:
    assert selection.kernel == outcome.ran
    assert {r.kernel for r in selection.refusals if r.kernel} == set(outcome.refusals)
    for refusal in selection.refusals:
        if refusal.kernel is not None:
            assert any(reason in refusal.reason for reason in outcome.refusals[refusal.kernel]), refusal
    winner = next((k for k in kernels if k.target == selection.kernel), None)
    assert selection.backend == (winner.backend.name if winner else "reference")
    assert len(selection.children) == (outcome.child is not None)
    for child in selection.children:
        require_as_predicted(child, outcome.child, kernels)


def require_error(action: Callable[[], object], outcome: Outcome, call: Call) -> None:
    """An explicit choice, or strict mode, that can't be satisfied: the error says of each kernel why."""
    failed = next(part for part in outcome.all() if part.ran is None or part.raised_by)
    if failed.raised_by:
        with pytest.raises(LaunchError, match=f"^{re.escape(failed.raised_by)} is broken"):
            action()
        return
    with pytest.raises(NoKernelError) as caught:
        action()
    message = str(caught.value)
    assert f"no kernel for {PLAIN if failed is outcome.child else call.op} on {call.device}" in message
    for target, reasons in failed.refusals.items():
        (line,) = (line for line in message.splitlines() if f"({target}): " in line)
        assert any(reason in line for reason in reasons), line


def often(value: Any, otherwise: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Two times of three the value that lets a kernel run: else hardly any would, with so many reasons against it."""
    return st.integers(0, 2).flatmap(lambda n: otherwise if n == 1 else st.just(value))


EVERY = frozenset(CAPABILITIES)
DRAWN = st.builds(
    Drawn,
    op=st.sampled_from((PLAIN, PLAIN, WHOLE)),
    requires=often(frozenset(), st.frozensets(st.sampled_from(CAPABILITIES), min_size=1)),
    priority=st.integers(0, 3),
    dtypes=often(None, st.sampled_from(DTYPES).map(lambda dtype: frozenset({dtype}))),
    most_rows=often(None, st.integers(1, 3)),
    gradients=st.sampled_from(("backward", "autograd", "autograd", "none")),
    composed=st.booleans(),
    fails=often(False, st.just(True)),
)
BACKENDS = st.lists(
    st.tuples(
        often("cpu", st.sampled_from((*DEVICES, "cuda"))),
        often(EVERY, st.frozensets(st.sampled_from(CAPABILITIES))),
        often(None, often(None, st.just("it is broken today"))),
        st.lists(DRAWN, min_size=1, max_size=4),
    ),
    max_size=4,
)
CALLS = st.builds(
    Call,
    op=st.sampled_from((PLAIN, WHOLE)),
    rows=st.integers(0, 4),
    dtype=st.sampled_from(DTYPES),
    device=often("cpu", st.sampled_from(DEVICES)),
    gradient=st.booleans(),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(backends=BACKENDS, call=CALLS, data=st.data())
def test_selection_is_as_its_rules_say(
    backends: list[tuple[str, frozenset[str], str | None, list[Drawn]]], call: Call, data: st.DataObject
) -> None:
    fake_device.enable()
    kernels: list[Drawn] = []
    with pytest.MonkeyPatch.context() as environment, ExitStack() as stack:
        stack.callback(kpt_core.refresh)
        for index, (device_type, capabilities, broken, drawn) in enumerate(backends):
            backend = Loopback(f"backend_{index}", device_type, capabilities, broken)
            for kernel in drawn:
                kernel.offer(backend, len(kernels) + 1)
                kernels.append(kernel)
            stack.enter_context(backend)
        asked = _ask(data, environment, stack, [f"backend_{i}" for i in range(len(backends))], kernels)
        op = kpt_core.get_op(call.op)

        foreseen = predict(call.op, call, asked, kernels, breaks=False, known=Counter())
        if foreseen.fails:
            require_error(lambda: op.explain(call.x()), foreseen, call)
        else:
            for _ in range(2):
                require_as_predicted(op.explain(call.x()), foreseen, kernels)

        known: Counter[str] = Counter()
        for attempt in ("first", "second", "third", "fourth"):
            outcome = predict(call.op, call, asked, kernels, breaks=True, known=known)
            if outcome.fails:
                event("nothing may run" if outcome.raised_by is None else "a kernel's error is raised")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FallbackWarning)
                    warnings.simplefilter("ignore", KernelFailedWarning)
                    require_error(lambda: op(call.x()), outcome, call)
                break
            if attempt == "first":
                event(f"{call.op}: {'the reference' if outcome.ran == 'reference' else 'a kernel'} runs")
                event(f"{sum(len(part.broken) for part in outcome.all())} kernels fail")
            with warnings.catch_warnings(record=True) as warned, kpt_core.record() as log:
                warnings.simplefilter("always")
                result = op(call.x())
            assert result.tolist() == [outcome.value] * call.rows
            assert (result.device.type, str(result.dtype)) == (call.device, f"torch.{call.dtype}")
            _require_warnings(warned, outcome, said=attempt != "first")
            (recorded,) = log
            require_as_predicted(recorded, outcome, kernels)
            failed = [broken for part in outcome.all() for broken in part.broken]
            if not failed:
                assert replace(recorded, children=()) == op.explain(call.x())
            known.update(failed)


def _ask(
    data: st.DataObject,
    environment: pytest.MonkeyPatch,
    stack: ExitStack,
    names: list[str],
    kernels: list[Drawn],
) -> Asked:
    """Draw settings, and put them in force: environment variables and up to three blocks."""
    nameable = [*names, *(k.target for k in kernels)]
    choice = st.sampled_from([*nameable, "reference"])
    where = st.sampled_from(("*", "*", PLAIN, WHOLE))
    pairs = data.draw(
        often([], st.lists(st.tuples(where, choice), max_size=2, unique_by=lambda pair: pair[0])), label="KPT_USE"
    )
    to_disable = st.lists(st.sampled_from(nameable), max_size=2) if nameable else st.just([])
    disabled = data.draw(often([], to_disable), label="KPT_DISABLE")
    strict = data.draw(often(False, st.booleans()), label="KPT_STRICT")
    environment.setenv("KPT_USE", ",".join(name if op == "*" else f"{op}={name}" for op, name in pairs))
    environment.setenv("KPT_DISABLE", ",".join(disabled))
    environment.setenv("KPT_STRICT", "1" if strict else "0")
    kpt_core.refresh()
    # In the environment, what is said of one op goes before what is said of all.
    choices = [pair for pair in pairs if pair[0] == "*"] + [pair for pair in pairs if pair[0] != "*"]
    blocks = st.tuples(st.none() | choice, where, st.sampled_from((None, None, True, False)))
    for name, op, block_strict in data.draw(often([], st.lists(blocks, max_size=3)), label="use"):
        stack.enter_context(kpt_core.use(name, op=op, strict=block_strict))
        choices += [(op, name)] if name is not None else []
        strict = strict if block_strict is None else block_strict
    return Asked(tuple(choices), frozenset(disabled), strict)


def _require_warnings(warned: list[warnings.WarningMessage], outcome: Outcome, *, said: bool) -> None:
    """One of each kernel that failed, one of each op whose reference is slow the first time, and no other."""
    failed = [str(w.message).split()[1] for w in warned if w.category is KernelFailedWarning]
    slow = [str(w.message).split()[0] for w in warned if w.category is FallbackWarning]
    assert sorted(failed) == sorted(target for part in outcome.all() for target in part.broken)
    assert sorted(slow) == ([] if said else sorted(op for part in outcome.all() for op in part.slow))
    assert len(failed) + len(slow) == len(warned), [str(w.message) for w in warned]
