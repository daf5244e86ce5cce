"""Making ops, kernels and backends: what is refused, and the sentence that says why."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, Call, Kernel, RegistrationError, UnknownNameError, registry
from loopback import Loopback, scale

Add = Callable[[Backend], Backend]


def identity(x: Tensor, size: int = 1) -> Tensor:
    return x


@pytest.mark.parametrize("name", ["scale", "", ".scale", "sample.", "sample.scale.more", "1sample.scale", "a b.c"])
def test_an_op_s_name_is_family_and_operation(name: str) -> None:
    with pytest.raises(RegistrationError, match=r"is not of the form 'family.operation'"):
        kpt_core.op(name)(identity)
    assert name not in kpt_core.ops()


def no_tensor(size: int) -> Tensor: ...
def optional_tensor(x: Tensor | None = None) -> Tensor: ...
def configured(x: Tensor, mask: dict[str, Tensor]) -> Tensor: ...
def some_object(x: Tensor, mask: object) -> Tensor: ...
def unannotated(x: Tensor, size) -> Tensor: ...
def two_types(x: Tensor, size: int | float) -> Tensor: ...
def list_or_none(xs: list[Tensor] | None) -> Tensor: ...
def several(xs: list[Tensor]) -> Tensor: ...
def numbers(x: Tensor, sizes: list[int]) -> Tensor: ...
def sequence(x: Tensor, xs: Sequence[Tensor]) -> Tensor: ...
def gives_optional(x: Tensor, size: int) -> tuple[Tensor, Tensor | None]: ...
def reserved(x: Tensor, needs: int) -> Tensor: ...
def private(_x: Tensor) -> Tensor: ...
def gives_list(x: Tensor) -> list[Tensor]: ...
def gives_any_number(x: Tensor) -> tuple[Tensor, ...]: ...
def gives_unknown(x: Tensor): ...
def any_number(*xs: Tensor) -> Tensor: ...
def any_name(x: Tensor, **more: int) -> Tensor: ...
def saved_unannotated(call: Call): ...


@pytest.mark.parametrize(
    ("function", "settings", "said"),
    [
        (no_tensor, {}, "takes no tensor; one must be there to tell the device"),
        (optional_tensor, {}, "takes no tensor"),
        (configured, {}, r"parameter 'mask' is annotated dict.*take richer objects apart in the layer that calls"),
        (some_object, {}, "parameter 'mask' is annotated"),
        (unannotated, {}, "parameter 'size' is annotated None"),
        (two_types, {}, "parameter 'size' is annotated int . float"),
        (list_or_none, {}, "parameter 'xs' is annotated list"),
        (several, {}, "parameter 'xs' is annotated list"),
        (numbers, {}, "parameter 'sizes' is annotated list"),
        (sequence, {}, "parameter 'xs' is annotated collections.abc.Sequence"),
        (gives_optional, {}, r"its results \[1\] may be None; optional_results must name .* got \{\}"),
        (gives_optional, {"optional_results": {1: "size"}}, "optional_results must name"),
        (any_number, {}, "parameter 'xs' is variadic positional"),
        (any_name, {}, "parameter 'more' is variadic keyword"),
        (identity, {"mutates": ("cache",)}, "mutates 'cache', which is none of its tensors"),
        (identity, {"unread": ("size",)}, "unread 'size', which is none of its tensors"),
        (identity, {"autocast": ("y",)}, "autocast 'y', which is none of its tensors"),
        (reserved, {}, "the name of parameter 'needs' is taken"),
        (private, {}, "the name of parameter '_x' is taken"),
        (gives_list, {}, r"gives list\[.*expected Tensor, a tuple of so many, or None"),
        (gives_any_number, {}, r"gives tuple\[.*\.\.\.\]; expected"),
        (gives_unknown, {}, "gives None; expected"),
        (identity, {"random": True}, "random: it asks for 'seed', which is none of its parameters"),
        (identity, {"saves": "result"}, "saves is 'result'; expected a function or 'results'"),
        (
            identity,
            {"saves": "results", "fake_saves": len},
            "fake_saves goes with a function as saves; got .*'results'",
        ),
        (identity, {"saves": saved_unannotated}, "saves must be annotated to give a tuple of so many tensors"),
    ],
)
def test_what_an_op_declares_must_hold(function: Callable[..., Any], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RegistrationError, match=f"op 'sample.refused': .*{said}|op 'sample.refused' {said}"):
        kpt_core.op("sample.refused", **settings)(function)
    assert "sample.refused" not in kpt_core.ops()


def test_a_name_belongs_to_one_function() -> None:
    with pytest.raises(RegistrationError, match=r"'sample.scale' is defined in loopback:scale and in .*:identity"):
        kpt_core.op("sample.scale")(identity)
    assert kpt_core.get_op("sample.scale") is scale


def test_a_module_may_be_imported_again_and_compiled_code_runs_the_new_op(
    add: Add, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    monkeypatch.setattr(registry, "_ops", dict(registry._ops))
    for factor in (2, 3):

        @kpt_core.op("sample.again")
        def again(x: Tensor) -> Tensor:
            return x * factor  # noqa: B023

    assert kpt_core.get_op("sample.again") is again
    compiled = torch.compile(lambda x: again(x), fullgraph=True, backend="eager")
    assert [run(torch.ones(1)).item() for run in (again, compiled)] == [3, 3]
    for name in ("one", "other"):
        add(Loopback(Kernel("sample.again", "loopback:first"), name=name))
        monkeypatch.setattr("loopback.first", lambda call, said=name: call.x + len(said))
        torch._dynamo.reset()
        assert [run(torch.ones(1)).item() for run in (again, compiled)] == [1 + len(name)] * 2
        registry.remove_backend(name)
    with pytest.raises(RegistrationError, match=r"'sample.again' was defined with other parameters before: restart"):

        @kpt_core.op("sample.again")
        def again(x: Tensor, size: int) -> Tensor: ...


def test_two_ops_do_not_share_a_torch_op() -> None:
    kpt_core.op("sample.twin_x")(identity)
    for name in ("sample_twin.x", "sample.scale_backward"):
        with pytest.raises(RegistrationError, match=f"op '{name}' needs the name kpt::.*, which 'sample.*' has"):
            kpt_core.op(name)(identity)
        assert name not in kpt_core.ops()


def test_an_op_looks_like_its_reference() -> None:
    assert (scale.__name__, scale.__module__, repr(scale)) == ("scale", "loopback", "<op sample.scale>")
    assert str(scale.__doc__).startswith("Multiply")
    assert list(inspect.signature(scale).parameters) == ["x", "weight", "factor"]


def test_get_op_offers_the_nearest() -> None:
    assert kpt_core.get_op("sample.scale") is scale
    with pytest.raises(UnknownNameError) as caught:
        kpt_core.get_op("sample.scal")
    assert caught.value.nearest[0] == "sample.scale"
    assert "did you mean 'sample.scale'" in str(caught.value)
    assert isinstance(caught.value, LookupError)


def test_what_does_not_derive_from_backend_is_none() -> None:
    with pytest.raises(RegistrationError, match=r"is no backend: derive its class from kpt_core.Backend"):
        registry.add_backend(object())
    with pytest.raises(RegistrationError, match="is a class; give an instance"):
        registry.add_backend(Loopback)


@pytest.mark.parametrize("name", ["reference", "torch", "two words", "", "a:b", "x=y", "a,b", None])
def test_a_backend_s_name_can_be_asked_for(name: str) -> None:
    with pytest.raises(RegistrationError, match="is reserved or no identifier"):
        registry.add_backend(Loopback(name=name))


@pytest.mark.parametrize("types", ["cuda", (), ("cuda", 1), None])
def test_a_backend_s_device_types_are_a_tuple_of_names(types: Any) -> None:
    with pytest.raises(RegistrationError, match="device_types of backend 'loop' must be a tuple of torch's"):
        registry.add_backend(Loopback(device_types=types))


def test_a_backend_s_name_is_taken_once(add: Add) -> None:
    add(Loopback())
    with pytest.raises(RegistrationError, match=r"'loop' exists already \(added by this process\)"):
        registry.add_backend(Loopback())


def test_removing_what_was_not_added_offers_the_nearest(add: Add) -> None:
    add(Loopback())
    with pytest.raises(UnknownNameError, match="unknown added backend 'lop': did you mean 'loop'"):
        registry.remove_backend("lop")


def test_added_backends_survive_refresh_and_torch_comes_last(add: Add) -> None:
    backend = add(Loopback())
    kpt_core.refresh()
    assert list(kpt_core.backends()) == ["loop", "torch"]
    assert kpt_core.backends()["loop"] is backend


def test_a_backend_that_only_has_a_name_describes_its_device_by_torch() -> None:
    class Plain(Backend):
        name, device_types = "plain", ("cpu",)

    plain, cpu = Plain(), torch.device("cpu")
    assert (plain.unavailable(), plain.capabilities(cpu), list(plain.kernels())) == (None, frozenset(), [])
    assert plain.device_name(torch.device("mtia")) == "mtia" or torch.mtia.is_available()
    assert [plain.reference_is_slow(torch.device(kind)) for kind in ("cpu", "meta", "cuda")] == [False, False, True]
    assert (plain.tuning, plain.chips) == (None, ())


@pytest.mark.parametrize("method", ["serves", "reference_is_slow"])
def test_a_backend_that_exits_when_it_is_asked_costs_nobody(add: Add, x: Tensor, method: str) -> None:
    broken = Loopback(name="broken", device_types=("cpu",), slow=True)

    def leave(*_: object) -> bool:
        raise SystemExit(3)

    setattr(broken, method, leave)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        add(broken)
        assert torch.equal(scale(x, x), x * x)
    assert f"backend 'broken': {method}() raised SystemExit: 3" in str(caught[0].message)
    assert kpt_core.explain(scale, x, x).kernel == "reference"


def test_kernels_are_values() -> None:
    one = Kernel("sample.scale", "a:b", requires={"x", "y"}, dtypes={"float32", "torch.float64"})
    other = Kernel("sample.scale", "a:b", requires=frozenset("yx"), dtypes=frozenset({"float64", "float32"}))
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(AttributeError):
        one.priority = 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"forward": "loopback"}, "'loopback' is not of the form 'package.module:name'"),
        ({"forward": ":first"}, "':first' is not of the form"),
        ({"backward": "loopback:"}, "'loopback:' is not of the form"),
        ({"unsupported": "loopback.first"}, "'loopback.first' is not of the form"),
        ({"configs": "x"}, "'x' is not of the form"),
        ({"requires": "sm90"}, "requires must be a set of names; got 'sm90': put it in braces"),
        ({"requires": {90}}, "requires must hold names alone"),
        ({"composed_of": "sample.scale"}, "composed_of must be a set of names; got 'sample.scale'"),
        ({"dtypes": "float32"}, "dtypes must be a set of names; got 'float32'"),
        ({"dtypes": {"flaot32"}}, "dtypes names 'flaot32', which is no dtype of torch"),
        ({"dtypes": {"Tensor"}}, "dtypes names 'Tensor', which is no dtype"),
        ({"priority": "2"}, "priority must be int; got '2'"),
        ({"priority": True}, "priority must be int; got True"),
        ({"forward": None}, "forward must be str; got None"),
        ({"backward": 3}, "backward must be str; got 3"),
        ({"deterministic": "no"}, "deterministic must be bool; got 'no'"),
        ({"differentiable": True, "backward": "a:b"}, "differentiable and names a backward; autograd needs but one"),
    ],
)
def test_what_a_kernel_says_must_have_a_meaning(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RegistrationError, match=f"of sample.scale: .*{said}"):
        Kernel("sample.scale", **{"forward": "loopback:first", **settings})


def test_a_cpu_is_not_waited_for_as_if_it_were_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise ValueError(f"{device.type} doesn't match the current accelerator")  # as torch does where there is one

    monkeypatch.setattr(torch.accelerator, "synchronize", refuse)
    Loopback().synchronize(torch.device("cpu"))
    with pytest.raises(ValueError, match="meta doesn't match"):
        Loopback().synchronize(torch.device("meta"))
