"""torch.func and forward-mode AD over ops: the numbers are those of plain PyTorch, by kernels under `grad` alone."""

import warnings
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
from kpt_core.errors import KernelFailedWarning, KptWarning
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
#: Those that are one gradient and nothing else where the op is called; what differentiates `jacrev` is mapped.
BY_KERNELS = {"grad": 1, "grad and value": 1, "vjp": 1, "jacrev": 0}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_equal_plain_pytorch(name: str) -> None:
    args = draw(3, 5), draw(5, 4), draw(4)
    expected = TRANSFORMS[name](layer.reference, *args)
    torch.testing.assert_close(TRANSFORMS[name](layer, *args), expected)
    assert (RAN["layer_kernel"], RAN["layer_backward"]) == (int(name in BY_KERNELS), BY_KERNELS.get(name, 0))
    layer(*args)
    assert RAN["layer_kernel"] == 1 + (name in BY_KERNELS)  # outside, a kernel serves


def test_gradients_of_kernels_are_differentiated_by_plain_pytorch() -> None:
    """By whatever comes later: autograd outside, and transforms of a vjp that was taken before."""
    x, weight, bias = draw(3, 5).requires_grad_(), draw(5, 4).requires_grad_(), draw(4)
    slope, way = draw(3, 4), torch.cos(draw(3, 4))

    def later(run: Callable[..., Tensor]) -> list[Any]:
        # The weight is no argument of `grad`, and what is made of it wants a gradient outside alone.
        first = grad(lambda x: loss(run, x, weight * 2, bias))(x)
        found: list[Any] = [first, *torch.autograd.grad(first.square().sum(), (x, weight))]
        _, pull = vjp(lambda *given: run(*given, bias), x.detach(), weight.detach())
        found += [pull(slope), vmap(pull)(torch.stack((slope, way)))]
        found += [grad(lambda slope: pull(slope)[0].square().sum())(slope), jvp(pull, (slope,), (way,))]
        return [*found, jacrev(lambda slope: pull(slope)[1])(slope), hessian(lambda s: pull(s)[0].pow(3).sum())(slope)]

    torch.testing.assert_close(later(layer), later(layer.reference))
    assert RAN["layer_backward"] >= 2


@pytest.mark.parametrize("around", ["autocast", "no_grad", "profiler"])
def test_gradients_by_kernels_in_contexts(around: str) -> None:
    args = draw(3, 5).float(), draw(5, 4).float(), draw(4).float()

    def taken(run: Callable[..., Tensor], context: Any) -> Any:
        def inside(x: Tensor) -> Tensor:
            with torch.no_grad() if around == "no_grad" else nullcontext():
                held = run(x, *args[1:])
            return (held * x.sum()).sum()

        with context:
            return grad(inside)(args[0])

    contexts = {"autocast": torch.autocast("cpu", torch.bfloat16), "profiler": torch.autograd.profiler.profile()}
    found = taken(layer, contexts.get(around, nullcontext()))
    torch.testing.assert_close(found, taken(layer.reference, nullcontext()))  # in float32, backward too
    assert RAN["layer_kernel"] == 1


def test_plain_pytorch_tells_once_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "plain_bytes", lambda call: 2**26 * call.x.shape[0])
    args = draw(3, 5), draw(5, 4)

    def told(run: Callable[[], Any]) -> list[str]:
        monkeypatch.setattr(layer, "told_of", set())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
            run()
        return [str(each.message) for each in caught if issubclass(each.category, KptWarning)]

    x, weight = (each.clone().requires_grad_() for each in args)
    assert not told(lambda: grad(lambda x: layer(x, args[1]).sum())(args[0]))
    assert not told(lambda: layer(x, weight).sum().backward())
    (jvp_of,) = told(lambda: jvp(lambda x: layer(x, args[1]), args[:1], args[:1]))
    assert jvp_of.startswith(
        "torch.func.jvp of toy.layer computes in plain PyTorch and takes about 503 MB for x [3, 5]"
    )
    assert not told(lambda: vmap(lambda row: layer(row[None], args[1]))(args[0]))
    # Rows that are mapped count: 201 MB before, and now 2.1 GB.
    (vmap_of,) = told(lambda: vmap(lambda row: layer(row[None], args[1]))(draw(32, 5)))
    assert vmap_of.startswith("torch.func.vmap of toy.layer computes in plain PyTorch and takes about 2.1 GB")
    (second,) = told(lambda: torch.autograd.grad(layer(x, weight).sum(), x, create_graph=True)[0].sum().backward())
    assert second.startswith("a second derivative of toy.layer")
    (both,) = told(lambda: vmap(grad(lambda row: layer(row[None], args[1]).sum()))(args[0]))
    assert both.startswith("torch.func.vmap of torch.func.grad of toy.layer")


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

    def each() -> None:
        vmap(grad(told))(x[None])

    with record() as ran:
        each()
        jvp(lambda x: scale(x, x), (x,), (x,))
    assert [each.kernel for each in ran] == ["reference"] * 2
    assert "a transform of torch.func is at work" in str(ran[0])
    for choice in ("other", "loopback:first"):
        with use(choice), pytest.raises(NoKernelError, match="transform of torch"):
            each()
        with use(choice), pytest.raises(NoKernelError, match="forward only"):
            grad(lambda x: scale(x, x).sum())(x)
    with use("reference", strict=True):
        each()
        grad(told)(x)


def test_choices_hold_and_are_told_under_grad(add: Add) -> None:
    args = draw(3, 5), draw(5, 4)

    def told(x: Tensor) -> Tensor:
        names.append(explain(layer, x, args[1]).kernel)
        return layer(x, args[1]).sum()

    names: list[str] = []
    for choice in ("reference", "toy_ops:layer_kernel_for_many"):
        with use(choice), record() as ran:
            grad(told)(args[0])
        assert [each.kernel for each in ran] == [choice] == names
        names.clear()


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
    vmap(grad(lambda row: scale(row, row).sum()))(x)
    jvp(lambda row: scale(row, row), (x,), (x,))
    make_fx(lambda row: scale(row, row), tracing_mode="fake")(x)
    make_fx(vmap(lambda row: scale(row, row)), tracing_mode="symbolic")(x)
    assert Fault.calls == 0
    Fault.error = None
    assert explain(scale, x, x).kernel == "loopback:faulty"
    assert hundreds(scale(x, x)) == 5


def test_a_kernel_that_raises_gives_way_under_grad(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("faulty", backward="faulty_backward"), name="other"))
    expected = grad(lambda row: scale.reference(row, row).sum())(x)
    Fault.error = RuntimeError("no storage")
    with pytest.warns(KernelFailedWarning, match="no storage"):
        torch.testing.assert_close(grad(lambda row: scale(row, row).sum())(x), expected)
    with use(strict=True), pytest.raises(RuntimeError, match="no storage"):
        grad(lambda row: scale(row, row).sum())(x)


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
