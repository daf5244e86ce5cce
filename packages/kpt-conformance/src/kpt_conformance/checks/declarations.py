"""What a kernel says of itself, and what its op says of wrong input."""

import re

import pytest
import torch

import kpt_core
from kpt_conformance.trial import Subject
from kpt_core import CaseTable, WrongInput


def declaration(subject: Subject, table: CaseTable) -> None:
    """The kernel loads, takes the op's parameters, and accepts a case; what it refuses, it refuses in a sentence."""
    kernel = subject.kernel
    if kernel is not None:
        kernel.load()
    refusals = {}
    for case in table.cases:
        for dtype in table.dtypes:
            if case.large and subject.device.type == "cpu":
                continue
            arguments = table.arguments(case, dtype=dtype, device=subject.device)
            refusals[f"{case.name}, {dtype}"] = subject.refusal(arguments)
    assert None in refusals.values(), "it refuses every case:\n" + "\n".join(
        f"{name}: {refusal}" for name, refusal in refusals.items()
    )
    unsupported = kernel.load_unsupported() if kernel else None
    if unsupported is not None:
        for case in table.cases[:3]:
            args, kwargs = subject.split(table.arguments(case, dtype=table.dtypes[0], device=subject.device))
            reason: object = unsupported(*args, **kwargs)
            sentence = isinstance(reason, str) and len(reason) > 10 and " " in reason
            assert reason is None or sentence, (
                f"unsupported must give None or a sentence; it gave {reason!r} for {case.name}"
            )


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
