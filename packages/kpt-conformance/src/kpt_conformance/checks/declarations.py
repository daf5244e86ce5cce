"""What a kernel says of itself, and what its op says of wrong input."""

import inspect
import itertools
import re
from typing import Any

import pytest
import torch

import kpt_core
from kpt_conformance.subject import Subject
from kpt_conformance.trial import Trial
from kpt_core import Refusal
from kpt_core.contract import load
from kpt_optimize.cases import CaseTable, WrongInput


def declaration(subject: Subject, table: CaseTable) -> None:
    """The kernel's functions load and take a call's record, and a case is accepted; refusals are sentences.

    A kernel that promises gradients has to accept a case with them: else every other check would be skipped.
    """
    dtypes = subject.dtypes(table)
    assert dtypes, f"it takes none of the dtypes in which {table.op} is tried: {', '.join(map(str, table.dtypes))}"
    if subject.kernel is not None:
        _require_parameters(subject.kernel.forward, "call")
    if subject.kernel is not None and subject.kernel.backward is not None:
        _require_parameters(subject.kernel.backward, "call", "saved", *["grad"] * subject.op.result_count)
    cases = [case for case in table.cases if not (case.large and subject.device.type == "cpu")]
    refusals: dict[str, str | None] = {}
    taken: dict[torch.dtype, bool] = {}
    for case, dtype in itertools.product(cases, dtypes):
        arguments = table.arguments(case, dtype=dtype, device=subject.device)
        refusal = refusals[f"{case.name}, {dtype}"] = Trial(subject, table, case, dtype).refusal(arguments)
        reason = subject.unsupported(arguments)
        sentence = isinstance(reason, str | Refusal) and len(str(reason)) > 10 and " " in str(reason)
        told = f"unsupported must give None, a Refusal or a sentence; it gave {reason!r} for {case.name}, {dtype}"
        assert reason is None or sentence, told
        taken[dtype] = taken.get(dtype, False) or refusal is None
        if refusal is None and (subject.kernel is None or subject.kernel.unsupported is None):
            break
    refused = "\n".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    if subject.children and None not in refusals.values():
        pytest.skip(f"the kernels of its parts refuse every case:\n{refused}")
    with_gradients = " when gradients are wanted (a kernel that gives none has no backward and is not differentiable)"
    assert None in refusals.values(), f"it refuses every case{with_gradients if table.gradients else ''}:\n{refused}"
    never = [str(dtype) for dtype, taken_once in taken.items() if not taken_once]
    assert subject.children or not never, (
        f"it refuses every case of {', '.join(never)}: leave that out of its `dtypes`\n{refused}"
    )


def _require_parameters(target: str, *parameters: str) -> None:
    """Raise `AssertionError` unless a function can be called with these."""
    function: Any = load(target)
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise AssertionError(f"{target} must take ({', '.join(parameters)}): {error}") from None
    except ValueError:
        pass  # of a language that tells no signature


def device_index(subject: Subject, table: CaseTable) -> None:
    """The backend says the same of `cuda` as of `cuda:0`."""
    backend = kpt_core.backends().get(subject.backend)
    if backend is None:
        pytest.skip("a reference belongs to no backend")
    for device_type in filter(_known, backend.device_types):
        plain, first = torch.device(device_type), torch.device(device_type, 0)
        assert backend.capabilities(plain) == backend.capabilities(first)


def wrong_input(subject: Subject, table: CaseTable, wrong: WrongInput) -> None:
    """A wrong call is refused before a kernel sees it: the error's type, and a message that says what was expected."""
    arguments = wrong.change(table.arguments(wrong, device=subject.device))
    with pytest.raises(wrong.error) as raised, subject.chosen():
        subject.call(arguments)
    message = str(raised.value).replace(str(subject.device), "cpu")
    assert re.search(wrong.message, message, re.S), f"the message does not match {wrong.message!r}: {message}"


def _known(device_type: str) -> bool:
    """Return whether torch knows a type of devices; it learns some names from a plug-in that need not be here."""
    try:
        return torch.device(device_type).type == device_type
    except RuntimeError:
        return False
