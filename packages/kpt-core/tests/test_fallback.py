"""Plain PyTorch where it is slow: KPT warns once, and raises when strict. Here the CPU calls itself an accelerator."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kpt_core
import loopback
from kpt_core import Backend, FallbackWarning, NoKernelError
from kpt_core.contract import GPU, TorchBackend
from loopback import Loopback, hundreds, kernel, mixed, scale, shifted

Add = Callable[[Backend], Backend]
PARTS = kernel("parts", "sample.shifted", composed_of=("sample.scale",))


@pytest.fixture(autouse=True)
def accelerator(add: Add, fresh_compiler: None) -> None:
    add(Loopback(name="vendor", slow=True))


def compiled(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(lambda *args: op(*args), backend="eager")


def warned_ops(call: Callable[[], object]) -> list[str]:
    """Names of the ops that a call warns of, and warns of but once."""
    with pytest.warns(FallbackWarning) as warned:
        call(), call()
    assert {w.filename for w in warned} <= {__file__, loopback.__file__}  # whoever called the op
    return [str(w.message).partition(" ")[0] for w in warned]


@pytest.mark.parametrize("how", [lambda op: op, compiled], ids=["eager", "compiled"])
def test_it_warns_once_for_each_op(how: Callable[..., Any], x: Tensor) -> None:
    one, other = how(scale), how(mixed)
    assert warned_ops(lambda: [one(t, t) for t in (x, x, x.double())]) == ["sample.scale"]
    assert warned_ops(lambda: other(x, x, x)) == ["sample.mixed"]
    kpt_core.refresh()
    torch._dynamo.reset()
    assert warned_ops(lambda: one(x, x)) == ["sample.scale"]


def test_the_warning_has_every_refusal(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("third"), name="other", device_types=("cuda",)))
    add(Loopback(kernel("first", requires={"sm90"}), capabilities={"sm80"}))
    with pytest.warns(FallbackWarning) as warned:
        scale(x, x)
    assert str(warned[0].message).splitlines() == [
        "sample.scale runs in plain PyTorch on cpu, which is slow; see `kpt doctor`",
        "  loop (loopback:first): needs sm90, which cpu lacks",
        "  other (loopback:third): runs on cuda; this call is on cpu",
    ]


def test_it_is_at_the_caller_s_line_under_autocast_too(x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert warned_ops(lambda: mixed(x, x, x)) == ["sample.mixed"]


def test_plain_pytorch_of_a_feature_package_is_slow_as_well(
    list_torch: Callable[..., None], x: Tensor, fresh_compiler: None
) -> None:
    list_torch(kernel("first", traceable=True))
    assert warned_ops(lambda: scale(x, x)) == ["sample.scale"]
    with kpt_core.use(strict=True), pytest.raises(NoKernelError, match=r"no kernel for sample.scale on cpu \(strict\)"):
        scale(x, x)


@pytest.mark.filterwarnings("error::kpt_core.FallbackWarning")
def test_pytorchs_own_kernels_for_gpus_are_not_slow(
    list_torch: Callable[..., None], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kpt_core.contract._GPUS", ("cpu",))
    list_torch(kernel("first", requires={GPU}, differentiable=True), kernel("second"))
    with kpt_core.use(strict=True):
        assert hundreds(scale(x, x)) == 1
    # The second call asks no more than what was accepted before.
    assert [hundreds(scale(x, x)) for _ in range(2)] == [1, 1]


def test_pytorchs_kernels_for_gpus_are_for_types_of_gpus_alone() -> None:
    told = {kind: TorchBackend().capabilities(torch.device(kind)) for kind in ("cuda", "xpu", "cpu", "meta")}
    assert told == {"cuda": {GPU}, "xpu": {GPU}, "cpu": {"host_memory"}, "meta": set()}


@pytest.mark.parametrize("strict", [False, True])
def test_it_is_no_news_where_it_was_asked_for_or_a_kernel_serves(add: Add, x: Tensor, strict: bool) -> None:
    with kpt_core.use("reference", strict=strict):
        assert hundreds(scale(x, x)) == 0
    meta = x.to("meta")
    with kpt_core.use(strict=strict):
        assert scale(meta, meta).is_meta
        add(Loopback(kernel("first")))
        assert hundreds(scale(x, x)) == 1


def test_a_backend_that_cannot_say_whether_it_is_slow_costs_one_problem(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> bool:
        raise OSError("no driver")

    monkeypatch.setattr(kpt_core.backends()["vendor"], "reference_is_slow", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert hundreds(scale(x, x)) == hundreds(scale(x, x)) == 0
    assert [str(w.message).partition("\n")[0] for w in caught] == [
        "KPT goes on without backend 'vendor': reference_is_slow() raised OSError: no driver",
        "sample.scale runs in plain PyTorch on cpu, which is slow; see `kpt doctor`",
    ]


def test_explain_leaves_the_warning_to_the_call(x: Tensor) -> None:
    assert kpt_core.explain(scale, x, x).kernel == "reference"
    assert warned_ops(lambda: scale(x, x)) == ["sample.scale"]


def test_explain_tells_that_a_backend_is_missing() -> None:
    with FakeTensorMode(), kpt_core.use(strict=True):
        absent = torch.empty(4, device="cuda")
        with pytest.raises(NoKernelError) as caught:
            kpt_core.explain(scale, absent, absent)
    assert str(caught.value).splitlines() == [
        "no kernel for sample.scale on cuda:0 (strict); no backend for cuda is installed; see `kpt doctor`",
        "  cuda backend: none is installed",
    ]


@pytest.mark.parametrize("traced_before", [False, True])
def test_strict_makes_it_an_error_with_every_refusal(add: Add, x: Tensor, traced_before: bool) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows")))
    large, code = torch.ones(5), compiled(scale)
    if traced_before:
        code(x, x)
    with kpt_core.use(strict=True):
        for call in (scale, scale.explain, code):
            call(x, x)
            with pytest.raises(NoKernelError, match=r"\(strict\).*\n  loop \(loopback:first\): 5 rows"):
                call(large, large)


def test_strict_from_the_environment(setting: Callable[[str, str], None], x: Tensor) -> None:
    setting("KPT_STRICT", "1")
    for call in (scale, compiled(scale)):
        with pytest.raises(NoKernelError, match=r"no kernel for sample.scale on cpu \(strict\)"):
            call(x, x)
    with kpt_core.use(strict=False), pytest.warns(FallbackWarning):
        scale(x, x)


def test_a_composite_whose_parts_a_kernel_serves_is_not_slow(
    add: Add, list_torch: Callable[..., None], x: Tensor
) -> None:
    list_torch(PARTS)
    add(Loopback(kernel("first")))
    with kpt_core.use(strict=True):
        assert [child.kernel for child in kpt_core.explain(shifted, x).children] == ["loopback:first"]
        assert [run(x)[0] for run in (shifted, compiled(shifted))] == [103, 103]


@pytest.mark.parametrize("how", [lambda op: op, compiled], ids=["eager", "compiled"])
def test_a_composite_leaves_it_to_the_part_that_its_kernel_refuses(
    add: Add, list_torch: Callable[..., None], how: Callable[..., Any]
) -> None:
    list_torch(PARTS)
    add(Loopback(kernel("first", unsupported="at_most_four_rows")))
    large, call = torch.ones(5), how(shifted)
    assert warned_ops(lambda: call(large)) == ["sample.scale"]
    for strict_call in (shifted.explain, call):
        with kpt_core.use(strict=True), pytest.raises(NoKernelError, match=r"no kernel for sample\.scale on"):
            strict_call(large)


@pytest.mark.parametrize("needs", [{"requires": {"sm90"}}, {"dtypes": {"bfloat16"}}])
def test_a_composite_is_slow_where_no_kernel_may_serve_its_parts(
    add: Add, list_torch: Callable[..., None], x: Tensor, needs: dict[str, Any]
) -> None:
    list_torch(PARTS)
    add(Loopback(kernel("first", **needs)))
    assert warned_ops(lambda: shifted(x)) == ["sample.shifted", "sample.scale"]
    with kpt_core.use(strict=True):
        for call in (shifted, shifted.explain, compiled(shifted)):
            with pytest.raises(NoKernelError, match=r"no kernel for sample\.shifted on cpu \(strict\)"):
                call(x)


def test_tables_are_no_matter_on_a_device_that_is_not_here(add: Add, setting: Callable[[str, str], None]) -> None:
    """Its name, by which tables are found, can't be asked for."""
    setting("KPT_TUNING", "1")
    add(Loopback(kernel("first"), device_types=("cuda",)))
    with FakeTensorMode():
        absent = torch.empty(4, device="cuda:63")
        assert kpt_core.explain(scale, absent, absent).kernel == "loopback:first"
