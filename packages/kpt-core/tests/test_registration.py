"""Making ops and adding backends: what is refused, and the sentence that says why."""

import inspect
from collections.abc import Callable

import pytest
from torch import Tensor

import kpt_core
from kpt_core import Backend, Kernel, RegistrationError, UnknownNameError, _registry
from loopback import Loopback, scale

Add = Callable[[Backend], Backend]


@pytest.mark.parametrize("name", ["scale", "", ".scale", "sample.", "sample.scale.more", "1sample.scale", "a b.c"])
def test_an_op_s_name_is_family_and_operation(name: str) -> None:
    with pytest.raises(RegistrationError, match=r"is not of the form 'family.operation'"):
        kpt_core.op(name)(lambda x: x)
    assert name not in kpt_core.ops()


def test_an_op_has_a_first_parameter() -> None:
    with pytest.raises(RegistrationError, match=r"'sample.nothing' has no parameters"):
        kpt_core.op("sample.nothing")(lambda: None)
    assert "sample.nothing" not in kpt_core.ops()


def test_a_name_belongs_to_one_function() -> None:
    def other(x: Tensor) -> Tensor:
        return x

    with pytest.raises(RegistrationError, match=r"'sample.scale' is defined in loopback.scale and in .*other"):
        kpt_core.op("sample.scale")(other)
    assert kpt_core.get_op("sample.scale") is scale


def test_the_same_function_may_be_defined_again_when_its_module_is_reloaded() -> None:
    again = kpt_core.op("sample.scale")(scale.reference)
    assert kpt_core.get_op("sample.scale") is again
    _registry.define(scale)
    assert kpt_core.get_op("sample.scale") is scale


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


@pytest.mark.parametrize(
    ("lacking", "said"),
    [(("kernels",), "it lacks kernels"), (("name", "unavailable"), "it lacks name, unavailable")],
)
def test_what_is_no_backend_is_told_what_it_lacks(lacking: tuple[str, ...], said: str) -> None:
    parts = dict.fromkeys(("name", "device_type", "unavailable", "capabilities", "kernels"), "x")
    thing = type("Thing", (), {name: value for name, value in parts.items() if name not in lacking})()
    with pytest.raises(RegistrationError, match=f"is not a Backend: {said}; see kpt_core.Backend"):
        kpt_core.add_backend(thing)


def test_a_class_is_no_backend() -> None:
    class Named(Loopback):
        name = "named"
        device_type = "cpu"

    with pytest.raises(RegistrationError, match="is a class; give an instance"):
        kpt_core.add_backend(Named)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["reference", "two words", "", "a:b", "x=y", "a,b"])
def test_a_backend_s_name_can_be_asked_for(name: str) -> None:
    with pytest.raises(RegistrationError, match="is reserved or not an identifier"):
        kpt_core.add_backend(Loopback(name=name))


def test_a_backend_s_name_is_taken_once(add: Add) -> None:
    add(Loopback())
    with pytest.raises(RegistrationError, match=r"'loop' exists already \(added by this process\)"):
        kpt_core.add_backend(Loopback())


def test_removing_what_was_not_added_offers_the_nearest(add: Add) -> None:
    add(Loopback())
    with pytest.raises(UnknownNameError, match="unknown added backend 'lop': did you mean 'loop'"):
        kpt_core.remove_backend("lop")


def test_added_backends_survive_refresh(add: Add) -> None:
    backend = add(Loopback())
    kpt_core.refresh()
    assert kpt_core.backends() == {"loop": backend}


def test_kernels_are_values() -> None:
    one = Kernel("sample.scale", "a:b", requires={"x", "y"}, dtypes={"float32", "torch.float64"})
    other = Kernel("sample.scale", "a:b", requires=frozenset("yx"), dtypes=frozenset({"float64", "float32"}))
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(AttributeError):
        one.priority = 3  # type: ignore[misc]
