"""What plug-ins offer is checked when it is found: kernels, capabilities, and whose code they are."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

import kpt_core
from kpt_core import registry
from plugins import BACKEND, GOOD, only_warning

Install = Callable[..., None]
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


def test_a_feature_package_lists_ops_and_kernels_together(plugin: Install) -> None:
    listed = "OPS = (double, kpt_core.Kernel('plugin.double', 'plug_ops:kernel'))"
    plugin("plug_ops", f"{GOOD}\n{listed}", "kpt.ops", plug_ops="plug_ops:OPS")
    double = kpt_core.get_op("plugin.double")
    assert double(torch.ones(2))[0] == 102
    assert kpt_core.explain(double, torch.ones(2)).identity == "torch/plugin.double/plug_ops:kernel"


POLICY = """
import sys, types
from kpt_core.policy import Tuned

def known(kernel):
    return Tuned({(): types.SimpleNamespace(kernel=kernel, config=None)})

"""


@pytest.mark.parametrize(
    ("source", "kernel", "fault"),
    [
        ("POLICY = lambda op, device, dtype, kernels: known(kernels[-1])", "plug_second:kernel", None),
        ("POLICY = lambda op, device, dtype, kernels: known('reference')", "reference", None),
        ("POLICY = lambda op, device, dtype, kernels: None", "plug_first:kernel", None),
        ("POLICY = lambda *args: sys.exit('no')", "plug_first:kernel", "policy plug_policy: it raised SystemExit: no"),
        ("POLICY = 3", "plug_first:kernel", "kpt.policies 'known' of dist-of-plug_policy 1.0: .* can't be called"),
    ],
    ids=["another kernel", "the reference", "nothing", "it exits", "no function"],
)
def test_a_policy_puts_a_kernel_first(plugin: Install, source: str, kernel: str, fault: str | None) -> None:
    plugin("plug_first", GOOD.replace('"{name}:kernel")', '"{name}:kernel", priority=9)'))
    plugin("plug_second", BACKEND)
    plugin("plug_policy", POLICY + source, "kpt.policies", known="plug_policy:POLICY")
    kpt_core.backends()
    with nullcontext() if fault is None else pytest.warns(kpt_core.PluginWarning, match=fault):
        assert kpt_core.explain("plugin.double", torch.ones(2)).kernel == kernel
