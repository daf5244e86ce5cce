"""Plug-ins are found when first asked for, and a broken one costs one warning with its name and nothing else."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import kpt_core
from kpt_core import PluginWarning, UnknownNameError, discovery, registry
from plugins import BACKEND, GOOD, entry_points_in, install

Install = Callable[..., None]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution into a folder that this process sees."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(discovery, "entry_points", lambda group: entry_points_in(tmp_path, group))
    monkeypatch.setattr(registry, "_ops", dict(registry._ops))
    yield lambda name, source=GOOD, *args, **entries: install(tmp_path, name, source, *args, **entries)
    for module in set(sys.modules) - before:
        if (tmp_path / f"{module}.py").exists():
            del sys.modules[module]


def only_warning(call: Callable[[], object]) -> str:
    """The text of the one warning that a call gives, and gives but once."""
    with pytest.warns(PluginWarning) as warned:
        (call(), call(), registry.problems())
    assert [w.filename for w in warned] == [__file__]
    (problem,) = registry.problems()
    assert str(warned[0].message) == f"KPT goes on without {problem}"
    return str(problem)


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


KERNELS = (
    "def kernels(self): return [{}, kpt_core.Kernel('plugin.double', 'plug_bad:kernel')]\nPlugin.kernels = kernels"
)


@pytest.mark.parametrize(
    ("source", "said", "served"),
    [
        (
            "def fail(self): raise OSError('no table')\nPlugin.kernels = fail",
            "kernels() raised OSError: no table",
            False,
        ),
        ("import sys\nPlugin.kernels = lambda self: sys.exit('no')", "kernels() raised SystemExit: no", False),
        ("Plugin.kernels = lambda self: None", "kernels() raised TypeError: 'NoneType' object is not iterable", False),
        (KERNELS.format("'plug_bad:kernel'"), "kernels() gave 'plug_bad:kernel', which is no kpt_core.Kernel", True),
        (KERNELS.format("None"), "kernels() gave None, which is no kpt_core.Kernel", True),
        (
            KERNELS.format("kpt_core.Kernel('plugin.duoble', 'plug_bad:kernel')"),
            "plug_bad:kernel is for 'plugin.duoble', which no installed package defines",
            True,
        ),
        (
            KERNELS.format("kpt_core.Kernel('plugin.double', 'plug_bad:other', composed_of=('plugin.doubl',))"),
            "plug_bad:other is for 'plugin.doubl', which no installed package defines",
            True,
        ),
        (
            KERNELS.format("kpt_core.Kernel('plugin.double', 'plug_bad:kernel', priority=1)"),
            "it offers plug_bad:kernel for plugin.double twice",
            True,
        ),
        (
            KERNELS.format("kpt_core.Kernel('plugin.double', 'plug_bad:kernel', dtypes={'flaot32'})"),
            "kernels() raised RegistrationError: kernel plug_bad:kernel of plugin.double: dtypes names 'flaot32'",
            False,
        ),
        (
            KERNELS.format("kpt_core.Kernel('plugin.double', 'plug_bad:kernel', requires='sm90')"),
            "requires must be a set of names; got 'sm90': put it in braces",
            False,
        ),
        (
            KERNELS.format("kpt_core.Kernel('plugin.double', 'plug_bad.kernel')"),
            "kernel plug_bad.kernel of plugin.double: 'plug_bad.kernel' is not of the form 'package.module:name'",
            False,
        ),
    ],
)
def test_what_is_wrong_with_a_plug_in_s_kernels_is_one_problem(
    plugin: Install, source: str, said: str, served: bool
) -> None:
    """And leaves the others', and its own others, as they are."""
    plugin("plug_good", GOOD.replace('"{name}:kernel")', '"{name}:kernel", priority=-1)'))
    plugin("plug_bad", BACKEND + "\n" + source)
    kpt_core.backends()
    double = kpt_core.get_op("plugin.double")
    problem = only_warning(lambda: double(torch.ones(2)))
    assert problem.startswith("backend 'plug_bad': ")
    assert said in problem
    assert kpt_core.explain(double, torch.ones(2)).backend == ("plug_bad" if served else "plug_good")


def test_kernels_for_features_that_are_not_installed_are_no_problem(plugin: Install) -> None:
    plugin(
        "plug_good", GOOD + KERNELS.format("kpt_core.Kernel('music.play', 'plug_bad:play')").replace("_bad", "_good")
    )
    kpt_core.backends()
    assert kpt_core.get_op("plugin.double")(torch.ones(2))[0] == 102
    assert registry.problems() == ()


@pytest.mark.parametrize("method", ["capabilities", "unavailable"])
@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        ("raise OSError('no driver')", "OSError: no driver"),
        ("raise kpt_core.InputError('no driver')", "InputError: no driver"),
        ("raise SystemExit('no driver')", "SystemExit: no driver"),
    ],
)
def test_a_backend_that_cannot_describe_its_device_is_refused(
    plugin: Install, method: str, raised: str, reason: str
) -> None:
    """Asked for by name, it tells what is the matter itself."""
    plugin("plug_bad", GOOD + f"\ndef fail(*_): {raised}\nPlugin.{method} = fail")
    kpt_core.backends()
    double = kpt_core.get_op("plugin.double")
    for call in (double, torch.compile(lambda x: double(x), backend="eager")):
        assert call(torch.ones(2))[0] == 2
    selection = kpt_core.explain(double, torch.ones(2))
    assert [refusal.reason for refusal in selection.refusals] == [f"its backend failed to describe cpu: {reason}"]
    with kpt_core.use("plug_bad"), pytest.raises(kpt_core.KptError, match="no driver"):
        double(torch.ones(2))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("'sm90'", "'sm90'"), ("['fast']", "['fast']"), ("None", "None")],
)
def test_capabilities_that_are_no_set_are_told(plugin: Install, answer: str, reason: str) -> None:
    source = GOOD.replace('"{name}:kernel")', '"{name}:kernel", requires={"fast"})')
    plugin("plug_bad", source + f"\nPlugin.capabilities = lambda self, device: {answer}")
    kpt_core.backends()
    (refusal,) = kpt_core.explain("plugin.double", torch.ones(2)).refusals
    assert refusal.reason.startswith("its backend failed to describe cpu: TypeError:")


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


def test_a_feature_package_lists_ops_and_kernels_together(plugin: Install) -> None:
    listed = "OPS = (double, kpt_core.Kernel('plugin.double', 'plug_ops:kernel'))"
    plugin("plug_ops", f"{GOOD}\n{listed}", "kpt.ops", plug_ops="plug_ops:OPS")
    double = kpt_core.get_op("plugin.double")
    assert double(torch.ones(2))[0] == 102
    assert kpt_core.explain(double, torch.ones(2)).identity == "torch/plugin.double/plug_ops:kernel"
    assert registry.packages_of("plugin.double") == dict.fromkeys(
        ("reference", "torch/plugin.double/plug_ops:kernel"), ("dist-of-plug_ops", "1.0")
    )


def test_packages_are_those_of_the_code(plugin: Install) -> None:
    """Not of the backend that offers it: two backends may offer a third package's kernel."""
    plugin("plug_code")
    borrowed = BACKEND.replace('"{name}:kernel"', '"plug_code:kernel"')
    plugin("plug_lends", borrowed)
    plugin("plug_too", borrowed)
    kpt_core.backends()
    found = registry.packages_of("plugin.double")
    assert found == dict.fromkeys(
        ("reference", *(f"{name}/plugin.double/plug_code:kernel" for name in ("plug_code", "plug_lends", "plug_too"))),
        ("dist-of-plug_code", "1.0"),
    )
    assert registry.origin("plug_too") == "dist-of-plug_too 1.0"


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
