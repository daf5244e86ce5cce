"""torch.func and forward-mode AD over ops: whatever kernels are there, the numbers are those of plain PyTorch."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import toy_ops
from kpt_core import Backend, Call, NoKernelError, explain, record, use
from loopback import Fault, Loopback, hundreds, kernel, scale
from toy_ops import KERNELS, RAN, layer

Add = Callable[[Backend], Backend]
# torch 2.13: its own first use of forward-mode AD in a process.
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def served(add: Add) -> None:
    """Every kernel that there is."""
    add(Loopback(*KERNELS))
    RAN.clear()


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def loss(run: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return run(x, weight, bias).square().sum()


def directions(run: Callable[..., Tensor], *args: Tensor) -> Any:
    return jvp(lambda *given: loss(run, *given), args, tuple(torch.cos(each) for each in args))


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda run, *args: grad(lambda *given: loss(run, *given), (0, 1, 2))(*args),
    "grad and value": lambda run, *args: grad_and_value(lambda *given: loss(run, *given), 1)(*args),
    "grad of grad": lambda run, *args: grad(lambda w: grad(lambda x: loss(run, x, w, args[2]))(args[0]).square().sum())(
        args[1]
    ),
    "vjp": lambda run, *args: vjp(lambda *given: run(*given), *args)[1](torch.ones(3, 4, dtype=torch.float64)),
    "jvp": directions,
    "jacrev": lambda run, *args: jacrev(lambda w: run(args[0], w))(args[1]),
    "jacfwd": lambda run, *args: jacfwd(lambda w: run(args[0], w))(args[1]),
    "hessian": lambda run, *args: hessian(lambda w: loss(run, args[0], w, args[2]))(args[1]),
    "vmap": lambda run, *args: vmap(lambda row: run(row[None], args[1], args[2]))(args[0]),
    "vmap over weights": lambda run, *args: vmap(lambda w: run(args[0], w))(torch.stack([args[1], 2 * args[1]])),
    "gradients of each sample": lambda run, *args: vmap(
        grad(lambda w, row: loss(run, row[None], w, args[2])), in_dims=(None, 0)
    )(args[1], args[0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_equal_plain_pytorch(name: str) -> None:
    args = draw(3, 5), draw(5, 4), draw(4)
    expected = TRANSFORMS[name](layer.reference, *args)
    torch.testing.assert_close(TRANSFORMS[name](layer, *args), expected)
    assert not RAN
    layer(*args)
    assert RAN  # outside, a kernel serves


@pytest.mark.parametrize("name", ["grad", "vmap", "gradients of each sample", "jvp"])
def test_transforms_compile(name: str, fresh_compiler: None) -> None:
    args = draw(3, 5), draw(5, 4), draw(4)
    compiled = torch.compile(lambda *args: TRANSFORMS[name](layer, *args), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), TRANSFORMS[name](layer.reference, *args))


def test_choices_hold_and_are_told_under_transforms(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first"), name="other"))

    def told(sample: Tensor) -> Tensor:
        assert explain(scale, sample, sample).kernel == "reference"
        return scale(sample, sample).sum()

    with record() as ran:
        grad(told)(x)
        jvp(lambda x: scale(x, x), (x,), (x,))
    assert [each.kernel for each in ran] == ["reference"] * 2
    assert "a transform of torch.func is at work" in str(ran[0])
    for choice in ("other", "loopback:first"):
        with use(choice), pytest.raises(NoKernelError, match="transform of torch"):
            grad(told)(x)
    with use("reference", strict=True):
        grad(told)(x)


def test_a_torch_kernel_that_autograd_differentiates_serves_under_transforms(
    list_torch: Callable[..., None], x: Tensor
) -> None:
    list_torch(kernel("first", differentiable=True))
    with record() as ran:
        found = grad(lambda x: scale(x, x).square().sum())(x)
        jvp(lambda x: scale(x, x), (x,), (x,))
        vmap(lambda row: scale(row, row))(x)
    assert [each.kernel for each in ran] == ["loopback:first", "loopback:first", "reference"]
    torch.testing.assert_close(found, grad(lambda x: (scale.reference(x, x) + 100).square().sum())(x))


def test_several_results_and_randomness_under_transforms() -> None:
    x = draw(4, 16)
    torch.testing.assert_close(
        vmap(grad(lambda row: toy_ops.best(row[None])[0].square().sum()))(x),
        vmap(grad(lambda row: toy_ops.best.reference(row[None])[0].square().sum()))(x),
    )
    _, tangent = jvp(lambda x: toy_ops.dropout(x, 1, 0), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, toy_ops.dropout(torch.ones_like(x), 1, 0))


def test_forward_mode_ad_without_torch_func() -> None:
    x, weight = draw(3, 5), draw(5, 4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangents = [forward_ad.unpack_dual(run(dual, weight)).tangent for run in (layer, layer.reference)]
    torch.testing.assert_close(*tangents)
    assert not RAN


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(draw(5, 6))
        self.second = torch.nn.Parameter(draw(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return layer(layer(x, self.first).tanh(), self.second).sum()


def test_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of each sample, and the product of its Hessian with a vector."""
    model, x = Model(), draw(3, 5)
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def results() -> list[Any]:
        def of_sample(weights: dict[str, Tensor], row: Tensor) -> Tensor:
            return functional_call(model, weights, (row[None],))

        each = vmap(grad(of_sample), in_dims=(None, 0))(weights, x)
        product = jvp(lambda w: grad(of_sample)(w, x[0]), (weights,), (weights,))
        return [each, product]

    found = results()
    monkeypatch.setitem(globals(), "layer", layer.reference)
    torch.testing.assert_close(found, results())


def test_a_kernel_that_raises_is_not_asked_under_transforms(add: Add, x: Tensor) -> None:
    """And so nothing of it is quarantined."""
    add(Loopback(kernel("faulty", backward="faulty_backward"), name="other"))
    Fault.error = RuntimeError("no storage")
    vmap(lambda row: scale(row, row))(x)
    grad(lambda row: scale(row, row).sum())(x)
    jvp(lambda row: scale(row, row), (x,), (x,))
    make_fx(lambda row: scale(row, row), tracing_mode="fake")(x)
    make_fx(vmap(lambda row: scale(row, row)), tracing_mode="symbolic")(x)
    assert Fault.calls == 0
    Fault.error = None
    assert explain(scale, x, x).kernel == "loopback:faulty"
    assert hundreds(scale(x, x)) == 5


@pytest.mark.parametrize("looked_on", [False, True])
def test_a_batch_of_gradients_at_once(looked_on: bool) -> None:
    """As `torch.autograd.functional` asks for: the backward itself is mapped."""
    x, weight = draw(3, 5).requires_grad_(), draw(5, 4).requires_grad_()
    slopes = draw(6, 3, 4)
    expected = torch.autograd.grad(layer.reference(x, weight), (x, weight), slopes, is_grads_batched=True)
    with torch.autograd.profiler.profile() if looked_on else nullcontext():
        found = torch.autograd.grad(layer(x, weight), (x, weight), slopes, is_grads_batched=True)
        whole = torch.autograd.functional.hessian(lambda w: loss(layer, x, w, slopes[0, 0]), weight, vectorize=True)
    torch.testing.assert_close(found, expected)
    assert RAN["layer_kernel"] == 2
    plain = torch.autograd.functional.hessian(lambda w: loss(layer.reference, x, w, slopes[0, 0]), weight)
    torch.testing.assert_close(whole, plain)


def test_a_check_sees_transformed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Any] = []
    monkeypatch.setattr(scale, "check", lambda call: shapes.append(tuple(call.x.shape)))
    vmap(lambda row: scale(row, row))(draw(3, 2))
    assert shapes == [(2,)]


def test_a_transform_inside_a_kernel_is_its_own_business(monkeypatch: pytest.MonkeyPatch, add: Add, x: Tensor) -> None:
    def by_rows(call: Call) -> Tensor:
        return vmap(lambda row: row * 1.0 + 100)(call.x)

    monkeypatch.setattr("loopback.first", by_rows)
    add(Loopback(kernel("first"), name="other"))
    assert hundreds(scale(x, x)) == 1
