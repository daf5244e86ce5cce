"""Memory while converting: bytes of all live tensors, counted after each of torch's operations."""

from itertools import pairwise

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kpt_fp8 import FP8Tensor, NativeFP8Linear, convert_model_to_fp8


class LiveBytes(TorchDispatchMode):
    """The largest sum of the bytes of storages that were made in here, or counted, and still are."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def count(self, tensor):
        for each in (tensor.codes, tensor.scale) if isinstance(tensor, FP8Tensor) else (tensor,):
            if not each.is_meta:
                storage = each.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    @property
    def live(self):
        self.storages = {key: each for key, each in self.storages.items() if not each[0].expired()}
        return sum(size for _, size in self.storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self.count(each)
        self.peak = max(self.peak, self.live)
        return out


def stack(layers, width=512, device=None):
    return nn.Sequential(*(nn.Linear(*pair, device=device) for pair in pairwise([width] * (layers + 1))))


def size(model):
    return sum(each.nbytes for each in model.parameters())


def test_the_count_sees_what_is_alive():
    with LiveBytes() as live:
        kept = torch.empty(1000)
        torch.empty(3000)
        assert live.live == 4000
        assert kept.double().nbytes == 8000
    assert live.peak == 16000


def test_converted_while_loading_a_model_is_never_in_memory_twice():
    """Layer by layer: its weight comes into memory, is quantised, and goes."""
    model = stack(88, device="meta")
    with LiveBytes() as live:
        for name in [name for name, _ in model.named_children()]:
            layer = model.get_submodule(name).to_empty(device="cpu")
            with torch.no_grad():
                layer.weight.fill_(0.5)
                layer.bias.zero_()
            model.set_submodule(name, NativeFP8Linear.from_linear(layer))
            del layer
    final = size(model)
    assert final < 1.03 * 88 * 512 * 512
    assert live.peak < 1.15 * final


#: Of a layer of `stack`, converted; and of what stands beside it while a part of it is quantised.
LAYER, PARTS = 1.1 * 2**18, 3 * 2**20


def test_in_place_nothing_is_there_twice():
    model = stack(8)
    before = size(model)
    with LiveBytes() as live:
        for each in model.parameters():
            live.count(each)
        del each
        convert_model_to_fp8(model, inplace=True)
        after = live.live
    assert after == size(model) < 0.27 * before
    assert live.peak < before + LAYER + PARTS


def test_a_copy_takes_what_it_keeps():
    model = stack(8)
    with LiveBytes() as live:
        for each in model.parameters():
            live.count(each)
        del each
        changed = convert_model_to_fp8(model)
        after = live.live
    assert after == size(model) + size(changed)
    assert live.peak < after + LAYER + PARTS
