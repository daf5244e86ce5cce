"""Kernels have their op's signature; where they don't, the error names both."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, Kernel, SignatureError
from loopback import Loopback, hundreds, kernel, scale

Add = Callable[[Backend], Backend]


def names(x: Tensor, w: Tensor, *, factor: float = 1.0) -> Tensor:
    return x


def order(weight: Tensor, x: Tensor, *, factor: float = 1.0) -> Tensor:
    return x


def kind(x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
    return x


def default(x: Tensor, weight: Tensor, *, factor: float = 2.0) -> Tensor:
    return x


def no_default(x: Tensor, weight: Tensor, *, factor: float) -> Tensor:
    return x


def fewer(x: Tensor, weight: Tensor) -> Tensor:
    return x


def more(x: Tensor, weight: Tensor, *, factor: float = 1.0, out: Tensor | None = None) -> Tensor:
    return x


def anything(*args: Any, **kwargs: Any) -> Tensor:
    return args[0]


@torch.library.custom_op("test_signature::other", mutates_args=())
def custom(x: Tensor, weight: Tensor, *, factor: float = 3.0) -> Tensor:
    return x.clone()


WRONG = {
    names: "x, w, *factor=1.0",
    order: "weight, x, *factor=1.0",
    kind: "x, weight, factor=1.0",
    default: "x, weight, *factor=2.0",
    no_default: "x, weight, *factor",
    fewer: "x, weight",
    more: "x, weight, *factor=1.0, *out=None",
    anything: "args, kwargs",
    custom: "x, weight, *factor=3.0",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: getattr(wrong, "__name__", "custom op"))
def test_a_mismatch_names_op_and_kernel_and_shows_both(
    add: Add, x: Tensor, wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loopback.first", wrong)
    add(Loopback(kernel("first", priority=-1), kernel("second")))
    for call in (scale, scale.explain):
        with pytest.raises(SignatureError) as caught:
            call(x, x)
        assert str(caught.value) == (
            f"kernel loopback:first takes ({WRONG[wrong]}), but op sample.scale takes "
            "(x, weight, *factor=1.0); make them equal"
        )


def test_it_is_found_when_the_kernel_would_serve_and_not_before(add: Add, x: Tensor) -> None:
    add(Loopback(Kernel("sample.scale", f"{__name__}:fewer", requires={"amx"}), kernel("second")))
    assert hundreds(scale(x, x)) == 2


def test_annotations_and_decorators_do_not_matter(add: Add, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopback.first", torch.no_grad()(lambda x, weight, *, factor=1.0: x + 100))
    add(Loopback(kernel("first")))
    assert hundreds(scale(x, x)) == 1


def test_custom_ops_are_compared_by_their_schema(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("opaque")))
    assert scale(x, x, factor=2.0)[0] == 602


def test_overloads_of_the_dispatcher_are_compared_by_their_schema(
    add: Add, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loopback.first", torch.ops.loopback.opaque.default)
    add(Loopback(kernel("first")))
    assert hundreds(scale(x, x)) == 6


@pytest.mark.parametrize("target", ["loopback", "loopback:", ":first", "loopback.first"])
@pytest.mark.parametrize("part", ["target", "unsupported"])
def test_malformed_targets_are_refused_when_declared(part: str, target: str) -> None:
    arguments: dict[str, Any] = {"target": "loopback:first", part: target}
    with pytest.raises(SignatureError, match=f"kernel for sample.scale: '{target}' is not of the form"):
        Kernel("sample.scale", **arguments)


def test_targets_may_lie_inside_a_class(add: Add, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Holder:
        @staticmethod
        def inner(x: Tensor, weight: Tensor, *, factor: float = 1.0) -> Tensor:
            return x + 700

    monkeypatch.setattr("loopback.Holder", Holder, raising=False)
    add(Loopback(kernel("Holder.inner")))
    assert hundreds(scale(x, x)) == 7
    assert kpt_core.explain(scale, x, x).kernel == "loopback:Holder.inner"
