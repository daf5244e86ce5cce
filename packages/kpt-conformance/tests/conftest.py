"""Running pytest inside a test."""

import sys
from collections.abc import Callable

import pytest

import kpt_core
from kpt_core.registry import remove_backend

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run_here(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run pytest in this process, and take back the backends that it adds.

    In a process of its own it would import torch and make every op's cases first, which takes ten times as long.
    """
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # a module that a test writes anew must not be taken for the old

    def run(*arguments: str) -> pytest.RunResult:
        before = kpt_core.backends()
        try:
            # Hypothesis would be imported anew by each run.
            return pytester.runpytest_inprocess("-W", "default", "-p", "no:hypothesispytest", *arguments)
        finally:
            for name in kpt_core.backends().keys() - before.keys():
                remove_backend(name)

    return run
