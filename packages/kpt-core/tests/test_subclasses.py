"""Tensors with rules of their own are refused in a sentence; plain ones by another name pass."""

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import kpt_core
import toy_ops
from kpt_core import Backend, InputError
from loopback import Fault, Loopback, hundreds, kernel, scale

Add = Callable[[Backend], Backend]


@pytest.fixture(autouse=True)
def served(add: Add, fresh_compiler: None) -> None:
    add(Loopback(kernel("faulty", backward="faulty_backward"), *toy_ops.KERNELS))


class Wrapped(Tensor):
    """A quantised tensor, in short: it holds another one and dispatches for itself."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(Wrapped, lambda each: each.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapped, func(*plain[0], **plain[1]))


class Logged(Tensor):
    """Sees every function of torch that it is passed to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(Tensor):
    """A plain tensor by another name."""


class Expert(torch.nn.Parameter):
    """A parameter by another name, as libraries mark those that are sharded."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(lambda *args: function(*args), backend="aot_eager")


@pytest.mark.parametrize("how", [lambda op: op, compiled, lambda op: op.explain], ids=["eager", "compiled", "explain"])
@pytest.mark.parametrize("make", [Wrapped, lambda x: x.as_subclass(Logged)], ids=["dispatch", "function"])
def test_a_tensor_with_rules_of_its_own_is_refused_wherever_it_stands(
    x: Tensor, make: Callable[[Tensor], Tensor], how: Callable[..., Any]
) -> None:
    odd = make(x)
    for name, args in (("x", (odd, x)), ("weight", (x, odd))):
        message = (
            rf"sample.scale: {name} is a test_subclasses\.(Wrapped|Logged), a tensor with rules of its own that no"
        )
        with pytest.raises(InputError, match=message) as caught:
            how(scale)(*args)
        assert "pass the plain tensors that it is made of" in str(caught.value)
    with pytest.raises(InputError, match=r"toy.layer: bias is a test_subclasses"):
        how(toy_ops.layer)(x[None], x[:, None], odd)
    assert Fault.calls == 0


def test_a_plain_tensor_by_another_name_passes(x: Tensor) -> None:
    for odd in (x.as_subclass(Named), Expert(x), torch.nn.Buffer(x), torch.nn.Parameter(x)):
        # Compiled, torch 2.13 itself takes a `Named` for no custom op.
        for run in (scale,) if type(odd) is Named else (scale, compiled(scale)):
            torch._dynamo.reset()
            assert hundreds(run(odd, x)) == 5
            assert hundreds(run(x, odd)) == 5
        assert kpt_core.explain(scale, odd, x).kernel == "loopback:faulty"


def test_a_parameter_s_gradient_comes(x: Tensor) -> None:
    weight = Expert(x.clone())
    scale(x, weight).sum().backward()
    assert hundreds(weight.grad) == 5


def test_nested_tensors_are_refused() -> None:
    odd = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(InputError, match=r"sample.scale: x is a torch.nested\..*NestedTensor, a tensor with rules of"):
        scale(odd, odd)


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one process."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch is built without distributed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_dtensor_is_refused_and_its_local_part_passes(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    x = torch.ones(4)
    odd = distribute_tensor(x, init_device_mesh("cpu", (1,)), [Replicate()])
    for args in ((odd, odd), (odd, x), (x, odd)):
        with pytest.raises(
            InputError, match=r"is a torch\.distributed\.tensor\.DTensor, .* local part by to_local\(\)"
        ):
            scale(*args)
    assert hundreds(scale(odd.to_local(), x)) == 5


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: torch.eye(4).to_sparse(), r"x is of layout torch.sparse_coo; .* pass x.to_dense\(\)"),
        (lambda: torch.eye(4).to_sparse_csr(), r"x is of layout torch.sparse_csr; .* pass x.to_dense\(\)"),
        (lambda: torch.eye(4).to_mkldnn(), r"x is of layout torch._mkldnn; .* pass x.to_dense\(\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "x is a nested tensor; .* unbind"),
    ],
)
def test_what_is_not_strided_ends_in_a_sentence(made: Callable[[], Tensor], said: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some layouts a prototype
        x = made()
        with pytest.raises(InputError, match=f"toy.best: {said}"):
            toy_ops.best(x)


def test_symbolic_trace_is_told_what_to_use() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scale(x, x)

    with pytest.raises(InputError, match=r"symbolic_trace can't record an op .*: use torch.export.export"):
        torch.fx.symbolic_trace(Model())
