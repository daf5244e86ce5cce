"""Importing the core brings torch, which is there anyway, and next to nothing else."""

import json
import os
import subprocess
import sys

import pytest

import kpt_core

#: Prints what the import added.
SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
import kpt_core
print(json.dumps(sorted(set(sys.modules) - before)))
"""
#: What the core needs for some calls alone, or not at all.
LATE = (
    "jax",
    "kpt_optimize",
    "numpy",
    "pandas",
    "torch._dynamo",
    "torch._inductor",
    "torch._subclasses.fake_tensor",
    "torch.distributed",
    "torch.testing",
    "torch.utils.checkpoint",
    "torch.utils.flop_counter",
    "transformers",
    "triton",
)


@pytest.fixture(scope="module")
def added() -> list[str]:
    """The modules that `import kpt_core` adds to those of `import torch`, in a fresh process."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KPT_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize("late", LATE)
def test_what_is_not_needed_is_not_imported(added: list[str], late: str) -> None:
    assert "kpt_core.operation" in added
    assert not [name for name in added if name == late or name.startswith(f"{late}.")]


def test_nothing_but_the_core_and_the_standard_library_is_imported(added: list[str]) -> None:
    """Above all no plug-in, and no part of torch that it loads late."""
    foreign = {name.partition(".")[0] for name in added} - {"kpt_core"} - set(sys.stdlib_module_names)
    assert foreign == set()


@pytest.mark.parametrize("name", kpt_core.__all__)
def test_what_is_offered_is_there(name: str) -> None:
    assert name in dir(kpt_core)
    assert getattr(kpt_core, name) is not None


def test_what_is_offered_is_what_users_and_authors_of_backends_need() -> None:
    assert len(kpt_core.__all__) < 30
    assert list(kpt_core.__all__) == sorted(kpt_core.__all__)


def test_what_is_not_offered_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'kpt_core' has no attribute 'tunes'"):
        kpt_core.tunes  # noqa: B018


def test_what_is_in_kpt_optimize_is_found_there_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    vars(kpt_core).pop("optimize", None)
    monkeypatch.setitem(sys.modules, "kpt_optimize", None)
    monkeypatch.delitem(sys.modules, "kpt_optimize.optimize", raising=False)
    with pytest.raises(
        ImportError, match=r"kpt_core\.optimize is in kpt-optimize: pip install ./packages/kpt-optimize"
    ):
        _ = kpt_core.optimize
    with pytest.raises(AttributeError, match="has no attribute 'optimise'"):
        _ = kpt_core.optimise
