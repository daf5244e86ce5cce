"""Plug-ins are found when first asked for, and a broken one costs one warning with its name and nothing else."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import kpt_core
from kpt_core import PluginWarning, UnknownNameError, _registry
from plugins import BACKEND, GOOD, entry_points_in, install

Install = Callable[..., None]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution into a folder that this process sees."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_registry, "entry_points", lambda group: entry_points_in(tmp_path, group))
    monkeypatch.setattr(_registry, "_ops", dict(_registry._ops))
    yield lambda name, source=GOOD, *args, **entries: install(tmp_path, name, source, *args, **entries)
    for module in set(sys.modules) - before:
        if (tmp_path / f"{module}.py").exists():
            del sys.modules[module]


def only_warning(call: Callable[[], object]) -> str:
    """The text of the one warning that a call gives, and gives but once."""
    with pytest.warns(PluginWarning) as warned:
        (call(), call(), kpt_core.problems())
    assert [w.filename for w in warned] == [__file__]
    (problem,) = kpt_core.problems()
    assert str(warned[0].message) == f"KPT goes on without {problem}"
    return str(problem)


def test_a_backend_is_found_with_its_origin(plugin: Install) -> None:
    plugin("plug_good")
    assert list(kpt_core.backends()) == ["plug_good"]
    assert _registry.origin("plug_good") == "dist-of-plug_good 1.0"
    assert kpt_core.problems() == ()


def test_installed_and_added_backends_serve_alike(plugin: Install) -> None:
    plugin("plug_good")
    kpt_core.backends()
    double = kpt_core.get_op("plugin.double")
    assert torch.equal(double(torch.ones(2)), torch.full((2,), 102.0))
    assert kpt_core.explain(double, torch.ones(2)).backend == "plug_good"
    with kpt_core.use("plug_good"):
        double(torch.ones(2))
    with pytest.raises(UnknownNameError, match="unknown added backend 'plug_good'"):
        kpt_core.remove_backend("plug_good")
    with pytest.raises(kpt_core.RegistrationError, match=r"exists already \(dist-of-plug_good 1.0\)"):
        kpt_core.add_backend(kpt_core.backends()["plug_good"])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('needs a licence')", "RuntimeError: needs a licence"),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("BACKENDS = 1", "AttributeError: module 'plug_bad' has no attribute 'BACKEND'"),
        ("(", "SyntaxError: '(' was never closed (plug_bad.py, line 1)"),
        (
            "class B:\n name = 'plug_bad'\n def kernels(self): return []\nBACKEND = B()",
            "it lacks device_type, unavailable, capabilities; see kpt_core.Backend for what is needed",
        ),
        (BACKEND + "\nBACKEND = Backend", "<class 'plug_bad.Backend'> is a class; give an instance of it"),
        (BACKEND + "\nBackend.name = 'other'", "its backend calls itself 'other'; make the two names equal"),
        (BACKEND + "\nBackend.name = 'reference'", "backend name 'reference' is reserved or not an identifier"),
    ],
)
def test_a_broken_plug_in_costs_one_warning_and_the_others_serve(plugin: Install, source: str, reason: str) -> None:
    plugin("plug_good")
    plugin("plug_bad", source)
    said = only_warning(kpt_core.backends)
    assert said.startswith("kpt.backends 'plug_bad' of dist-of-plug_bad 1.0: ")
    assert said.endswith(reason)
    assert list(kpt_core.backends()) == ["plug_good"]
    assert kpt_core.get_op("plugin.double")(torch.ones(2))[0] == 102


def test_two_plug_ins_of_one_name_are_both_left_out(plugin: Install) -> None:
    plugin("plug_a", BACKEND.replace("{name}", "same"), same="plug_a:BACKEND")
    plugin("plug_b", BACKEND.replace("{name}", "same"), same="plug_b:BACKEND")
    plugin("plug_good")
    assert only_warning(kpt_core.backends) == (
        "kpt.backends 'same': claimed by dist-of-plug_a 1.0 and by dist-of-plug_b 1.0; uninstall one of them"
    )
    assert list(kpt_core.backends()) == ["plug_good"]


def test_kernels_that_raise_cost_a_warning(plugin: Install) -> None:
    plugin("plug_bad", GOOD + "\ndef fail(self): raise OSError('no table')\nBackend.kernels = fail")
    kpt_core.backends()
    double = kpt_core.get_op("plugin.double")
    said = only_warning(lambda: double(torch.ones(2)))
    assert said == "backend 'plug_bad': kernels() raised OSError: no table"
    assert double(torch.ones(2))[0] == 2


def test_a_malformed_kernel_costs_a_warning(plugin: Install) -> None:
    plugin("plug_bad", GOOD.replace("{name}:kernel", "{name}.kernel"))
    kpt_core.backends()
    double = kpt_core.get_op("plugin.double")
    assert "SignatureError: kernel for plugin.double: 'plug_bad.kernel'" in only_warning(lambda: double(torch.ones(2)))


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("capabilities", "its backend failed to describe cpu: OSError: no driver"),
        ("unavailable", "its backend failed to describe cpu: OSError: no driver"),
    ],
)
def test_a_backend_that_cannot_describe_its_device_is_refused(plugin: Install, method: str, reason: str) -> None:
    plugin("plug_bad", GOOD + f"\ndef fail(*_): raise OSError('no driver')\nBackend.{method} = fail")
    kpt_core.backends()
    selection = kpt_core.explain("plugin.double", torch.ones(2))
    assert [refusal.reason for refusal in selection.refusals] == [reason]
    assert kpt_core.get_op("plugin.double")(torch.ones(2))[0] == 2


def test_an_unavailable_backend_is_refused_with_its_sentence(plugin: Install) -> None:
    plugin("plug_off", GOOD + "\nBackend.unavailable = lambda self: 'needs a driver of 2030'")
    kpt_core.backends()
    selection = kpt_core.explain("plugin.double", torch.ones(2))
    assert [str(refusal) for refusal in selection.refusals] == ["plug_off (plug_off:kernel): needs a driver of 2030"]


def test_ops_are_found_by_name(plugin: Install) -> None:
    plugin("plug_ops", GOOD, "kpt.ops", plug_ops="plug_ops:OPS")
    assert "plug_ops" not in sys.modules
    assert kpt_core.get_op("plugin.double").name == "plugin.double"
    with pytest.raises(UnknownNameError, match=r"unknown op 'plugin.duoble': did you mean 'plugin.double'"):
        kpt_core.get_op("plugin.duoble")


@pytest.mark.parametrize(
    ("listed", "shown"), [("[kernel]", "<function kernel at 0x"), ("['plugin.double']", "'plugin.double'")]
)
def test_what_is_listed_as_an_op_was_made_by_the_decorator(plugin: Install, listed: str, shown: str) -> None:
    plugin("plug_ops", GOOD + f"\nOPS = {listed}", "kpt.ops", plug_ops="plug_ops:OPS")
    said = only_warning(kpt_core.ops)
    assert said.startswith(f"kpt.ops 'plug_ops' of dist-of-plug_ops 1.0: RegistrationError: plug_ops:OPS lists {shown}")
    assert said.endswith("which was not made by @kpt_core.op")


def test_refresh_looks_again(plugin: Install) -> None:
    assert kpt_core.backends() == {}
    plugin("plug_good")
    assert kpt_core.backends() == {}
    kpt_core.refresh()
    assert list(kpt_core.backends()) == ["plug_good"]


SCRIPT = """
import warnings
import torch
import kpt_core
print("core is imported")

@kpt_core.op("script.op")
def op(x: torch.Tensor) -> torch.Tensor:
    return x

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    op(torch.ones(1))
    print("op is called")
    double = kpt_core.get_op("plugin.double")
    print(double(torch.ones(1)).item(), kpt_core.explain(double, torch.ones(1)).kernel)
print([str(w.message) for w in caught if "plug_" in str(w.message)])
"""


def test_in_a_process_of_its_own_importing_the_core_loads_no_plug_in(tmp_path: Path) -> None:
    """The real entry points, among whatever else is installed."""
    install(tmp_path, "plug_good", GOOD)
    install(tmp_path, "plug_bad", "raise RuntimeError('needs a licence')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "core is imported",
        "plug_good is imported",
        "op is called",
        "102.0 plug_good:kernel",
        "[\"KPT goes on without kpt.backends 'plug_bad' of dist-of-plug_bad 1.0: RuntimeError: needs a licence\"]",
    ], done.stderr
