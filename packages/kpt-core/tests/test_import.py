"""Importing the core brings torch, which is there anyway, and next to nothing else."""

import ast
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_every_member_can_be_looked_at_without_kpt_optimize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kpt_optimize", None)
    members = dict(inspect.getmembers(kpt_core))
    assert set(kpt_core.__all__) <= members.keys()
    names: dict[str, object] = {}
    exec("from kpt_core import *", names)
    assert set(kpt_core.__all__) <= names.keys()
    assert not hasattr(kpt_core, "optimize")


@pytest.mark.parametrize("path", sorted(Path(kpt_core.__file__).parent.rglob("*.py")), ids=lambda path: path.stem)
def test_the_core_names_kpt_optimize_in_docstrings_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
    assert "kpt_optimize" not in ast.unparse(tree)
