"""What training keeps between forward and backward: the input, the pre-activation, the routing, and nothing else."""

import gc
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from kpt_moe.composed_experts import composed_experts
from kpt_moe.experts import experts
from kpt_moe.transformers import NAME

HIDDEN, WIDTH, EXPERTS, TOP_K, TOKENS = 256, 96, 16, 8, 256


def saved_bytes(call: Callable[[], Tensor], parameters: list[nn.Parameter]) -> int:
    """Bytes of the storages that autograd holds on to, each counted once, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    sizes: dict[int, int] = {}
    alive = []  # an address says which storage it is only as long as the storage lives

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    assert out.requires_grad
    return sum(sizes.values())


def make(dtype: torch.dtype) -> tuple[Any, tuple[Tensor, Tensor, Tensor], int]:
    """Experts like Qwen3-MoE's, their arguments, and the least that any backward by the chain rule needs of them."""
    config = SimpleNamespace(
        num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=WIDTH, hidden_act="silu",
        _experts_implementation=NAME,
    )  # fmt: skip
    module = Qwen3MoeExperts(config).to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    x = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    index = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOP_K).to(dtype).requires_grad_()
    pre_activation = TOKENS * TOP_K * 2 * WIDTH * dtype.itemsize
    return module, (x, index, weights), x.nbytes + pre_activation + index.nbytes + weights.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_is_within_a_twentieth_of_the_least(dtype):
    module, args, least = make(dtype)
    parameters = list(module.parameters())
    saved = {}
    for implementation in (NAME, "grouped_mm", "eager"):
        module.config._experts_implementation = implementation
        saved[implementation] = saved_bytes(lambda: module(*args), parameters)
    ratios = {name: f"{size / least:.2f}" for name, size in saved.items()}
    print(f"\nsaved for backward in {dtype}, in units of input + pre-activation + routing: {ratios}")
    assert least * 0.9 <= saved[NAME] <= least * 1.05
    assert saved[NAME] < saved["grouped_mm"]
    assert saved[NAME] < saved["eager"]


#: The references keep what autograd asks for.
kernels = pytest.mark.parametrize("path", ["loop", "grouped"], indirect=True)


@kernels
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_save_the_same(dtype):
    module, args, least = make(dtype)
    parameters = list(module.parameters())
    assert saved_bytes(lambda: experts(*args, *parameters), parameters) <= least * 1.05


class Made(TorchDispatchMode):
    """Remembers, without keeping it alive, every storage that an operation makes."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.given:
                self.storages[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def alive(self) -> int:
        gc.collect()
        return sum(size for storage, size in self.storages.items() if not storage.expired())


@kernels
@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_else_stays_alive(dtype):
    # What autograd's hooks don't see, as an attribute of a function's context.
    module, args, least = make(dtype)
    with Made([*args, *module.parameters()]) as made:
        out = experts(*args, *module.parameters())
    given = args[0].nbytes + args[2].nbytes
    assert made.alive() - out.nbytes <= least * 1.05 - given
    del out
    assert made.alive() == 0


@kernels
@pytest.mark.usefixtures("path")
def test_frozen_experts_save_no_more():
    module, args, least = make(torch.float32)
    module.requires_grad_(False)
    assert saved_bytes(lambda: experts(*args, *module.parameters()), list(module.parameters())) <= least * 1.05


@pytest.mark.usefixtures("path")
def test_inference_saves_nothing():
    module, args, _ = make(torch.float32)
    packed = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(*args, *module.parameters())
    module.requires_grad_(False)
    constants = [tensor.detach() for tensor in args]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(*constants, *module.parameters())
    assert packed == []


def test_saved_tensors_may_be_moved_away():
    # As torch.autograd.graph.save_on_cpu and activation offloading do.
    module, args, _ = make(torch.float32)
    wanted = [args[0], args[2], *module.parameters()]
    grads = []
    for pack in (lambda tensor: tensor, torch.clone):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = experts(*args, *module.parameters())
        grads.append(torch.autograd.grad(out.sum(), wanted))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_an_input_changed_before_backward_is_noticed():
    module, args, _ = make(torch.float32)
    x = args[0].detach().clone().requires_grad_()
    hidden = x * 1
    out = experts(hidden, *args[1:], *module.parameters())
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_measure_sees_what_autograd_saves():
    # Composed of single operations, the same experts keep every intermediate.
    module, args, least = make(torch.float32)
    parameters = list(module.parameters())
    composed = saved_bytes(
        lambda: composed_experts(*args, *parameters, activation=lambda h: module._apply_gate(h)), parameters
    )
    assert composed > 1.5 * least
