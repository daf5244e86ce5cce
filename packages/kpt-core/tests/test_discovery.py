"""Plug-ins are found when first asked for, and a broken one costs one warning with its name and nothing else."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kpt_core
from kpt_core import UnknownNameError, registry
from plugins import BACKEND, GOOD, install, only_warning

Install = Callable[..., None]


def test_a_backend_is_found_with_its_origin(plugin: Install) -> None:
    plugin("plug_good")
    assert list(kpt_core.backends()) == ["plug_good", "torch"]
    assert registry.origin("plug_good") == "dist-of-plug_good 1.0"
    assert registry.problems() == ()


def test_installed_and_added_backends_serve_alike(plugin: Install) -> None:
    plugin("plug_good")
    kpt_core.backends()
    double = kpt_core.get_op("plugin.double")
    assert torch.equal(double(torch.ones(2)), torch.full((2,), 102.0))
    assert kpt_core.explain(double, torch.ones(2)).backend == "plug_good"
    with kpt_core.use("plug_good"):
        double(torch.ones(2))
    with pytest.raises(UnknownNameError, match="unknown added backend 'plug_good'"):
        registry.remove_backend("plug_good")
    with pytest.raises(kpt_core.RegistrationError, match=r"exists already \(dist-of-plug_good 1.0\)"):
        registry.add_backend(kpt_core.backends()["plug_good"])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('needs a licence')", "RuntimeError: needs a licence"),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("BACKENDS = 1", "AttributeError: module 'plug_bad' has no attribute 'BACKEND'"),
        ("(", "SyntaxError: '(' was never closed (plug_bad.py, line 1)"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("BACKEND = object()", " is no backend: derive its class from kpt_core.Backend"),
        (BACKEND + "\nBACKEND = Plugin", "<class 'plug_bad.Plugin'> is a class; give an instance of it"),
        (BACKEND + "\nPlugin.name = 'other'", "its backend calls itself 'other'; make the two names equal"),
        (BACKEND + "\nPlugin.name = 'reference'", "backend name 'reference' is reserved or no identifier"),
        (BACKEND + "\nPlugin.device_types = 'cpu'", "such as ('cuda',); got 'cpu'"),
    ],
)
def test_a_broken_plug_in_costs_one_warning_and_the_others_serve(plugin: Install, source: str, reason: str) -> None:
    plugin("plug_good")
    plugin("plug_bad", source)
    said = only_warning(kpt_core.backends)
    assert said.startswith("kpt.backends 'plug_bad' of dist-of-plug_bad 1.0: ")
    assert said.endswith(reason)
    assert list(kpt_core.backends()) == ["plug_good", "torch"]
    assert kpt_core.get_op("plugin.double")(torch.ones(2))[0] == 102


def test_two_plug_ins_of_one_name_are_both_left_out(plugin: Install) -> None:
    plugin("plug_a", BACKEND.replace("{name}", "same"), same="plug_a:BACKEND")
    plugin("plug_b", BACKEND.replace("{name}", "same"), same="plug_b:BACKEND")
    plugin("plug_good")
    assert only_warning(kpt_core.backends) == (
        "kpt.backends 'same': claimed by dist-of-plug_a 1.0 and by dist-of-plug_b 1.0; uninstall one of them"
    )
    assert list(kpt_core.backends()) == ["plug_good", "torch"]


def test_an_unavailable_backend_is_refused_with_its_sentence(plugin: Install) -> None:
    plugin("plug_off", GOOD + "\nPlugin.unavailable = lambda self: 'needs a driver of 2030'")
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
    assert said.endswith("which is neither an op nor a Kernel")


def test_refresh_looks_again(plugin: Install) -> None:
    assert list(kpt_core.backends()) == ["torch"]
    plugin("plug_good")
    assert list(kpt_core.backends()) == ["torch"]
    kpt_core.refresh()
    assert list(kpt_core.backends()) == ["plug_good", "torch"]


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
