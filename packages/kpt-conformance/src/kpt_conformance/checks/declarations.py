"""What a kernel says of itself, and what its op says of wrong input."""

import itertools
import re

import pytest
import torch

import kpt_core
from kpt_conformance.trial import Subject, Trial
from kpt_core import CaseTable, WrongInput


def declaration(subject: Subject, table: CaseTable) -> None:
    """The kernel loads, takes the op's parameters, and accepts a case; what it refuses, it refuses in a sentence.

    A kernel that promises gradients has to accept a case with them: else every other check would be skipped.
    """
    dtypes = subject.dtypes(table)
    assert dtypes, f"it takes none of the dtypes in which {table.op} is tried: {', '.join(map(str, table.dtypes))}"
    if subject.kernel is not None:
        subject.kernel.load()
    unsupported = subject.kernel.load_unsupported() if subject.kernel else None
    cases = [case for case in table.cases if not (case.large and subject.device.type == "cpu")]
    refusals = {}
    for case, dtype in itertools.product(cases, dtypes):
        arguments = table.arguments(case, dtype=dtype, device=subject.device)
        refusal = refusals[f"{case.name}, {dtype}"] = Trial(subject, table, case, dtype).refusal(arguments)
        if unsupported is None:
            if refusal is None:
                break
            continue
        args, kwargs = subject.split(arguments)
        reason: object = unsupported(*args, **kwargs)
        assert reason is None or (isinstance(reason, str) and len(reason) > 10 and " " in reason), (
            f"unsupported must give None or a sentence; it gave {reason!r} for {case.name}, {dtype}"
        )
    refused = "\n".join(f"{name}: {refusal}" for name, refusal in refusals.items())
    if subject.children and None not in refusals.values():
        pytest.skip(f"the kernels of its parts refuse every case:\n{refused}")
    with_gradients = " when gradients are wanted (a kernel that gives none is declared forward_only)"
    assert None in refusals.values(), f"it refuses every case{with_gradients if table.gradients else ''}:\n{refused}"


def device_index(subject: Subject, table: CaseTable) -> None:
    """The backend says the same of `cuda` as of `cuda:0`."""
    backend = kpt_core.backends().get(subject.backend)
    if backend is None:
        pytest.skip("a reference belongs to no backend")
    plain, first = torch.device(backend.device_type), torch.device(backend.device_type, 0)
    assert backend.capabilities(plain) == backend.capabilities(first)


def wrong_input(subject: Subject, table: CaseTable, wrong: WrongInput) -> None:
    """A wrong call is refused before a kernel sees it: the error's type, and a message that says what was expected."""
    arguments = wrong.change(table.arguments(wrong, device=subject.device))
    args, kwargs = subject.split(arguments)
    with pytest.raises(wrong.error) as raised, subject.chosen():
        subject.op(*args, **kwargs)
    message = str(raised.value).replace(str(subject.device), "cpu")
    assert re.search(wrong.message, message, re.S), f"the message does not match {wrong.message!r}: {message}"
