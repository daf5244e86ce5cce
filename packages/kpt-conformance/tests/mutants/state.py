"""Faults of kernels that remember: caches that go stale, shared workspaces, memory that is never given back."""

import time
from typing import Any

import torch
from torch import Tensor

from .mutant import Mutant, of_wrapper
from .wrappers import Wrap

MUTANTS: list[Mutant] = []


def fault(name: str, found_by: str, **settings: Any) -> Any:
    """Enter a mutant: the decorated function is given the right forward and backward, and gives others."""

    def enter(wrap: Wrap) -> None:
        MUTANTS.append(of_wrapper(name, found_by, wrap, **settings))

    return enter


@fault("results share one buffer", "double_use")
def _(forward, backward):
    buffers: dict[Any, Tensor] = {}

    def grouped_mm(call):
        out = forward(call)
        return buffers.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)

    return grouped_mm, backward


def _odd(call: Any) -> str | None:
    whole = call.x.numel() and all(size % 16 == 0 for size in (*call.x.shape, call.weight.shape[2]))
    # No case that somebody named.
    return None if whole and len(call.x) in (16, 32) else "needs sixteens, of which there are two at most"


@fault("results share one buffer where little is taken", "double_use", unsupported=_odd)
def _(forward, backward):
    buffers: dict[Any, Tensor] = {}

    def grouped_mm(call):
        out = forward(call)
        return buffers.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)

    return grouped_mm, backward


@fault("gradients share one buffer", "double_use")
def _(forward, backward):
    buffers: dict[Any, Tensor] = {}

    def grouped_mm_backward(call, saved, grad):
        made = backward(call, saved, grad)
        return {n: buffers.setdefault((n, g.shape, g.dtype), g.clone()).copy_(g) for n, g in made.items()}

    return forward, grouped_mm_backward


@fault("results share one buffer where no gradient is wanted", "without_gradients")
def _(forward, backward):
    buffers: dict[Any, Tensor] = {}

    def grouped_mm(call):
        out = forward(call)
        return out if call.needs else buffers.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)

    return grouped_mm, backward


@fault("results are views of a ring of four buffers", "double_use")
def _(forward, backward):
    ring: dict[Any, list[Tensor]] = {}

    def grouped_mm(call):
        out = forward(call)
        buffers = ring.setdefault((out.shape, out.dtype), [torch.empty_like(out) for _ in range(4)])
        buffers.append(buffers.pop(0))
        return buffers[0].copy_(out)

    return grouped_mm, backward


@fault("offsets are remembered by their shape", "double_use")
def _(forward, backward):
    ends: dict[Any, Tensor] = {}

    def grouped_mm(call):
        key = (call.x.shape, call.offsets.shape)
        return forward(call._replace(offsets=ends.setdefault(key, call.offsets.clone())))

    return grouped_mm, backward


@fault("results are remembered by shape", "double_use")
def _(forward, backward):
    results: dict[Any, Tensor] = {}

    def grouped_mm(call):
        key = (call.x.shape, call.weight.shape, call.x.dtype, call.needs)
        if key not in results:
            results[key] = forward(call)
        return results[key].clone()

    return grouped_mm, backward


@fault("results are remembered by the addresses of the arguments", "changed_in_place")
def _(forward, backward):
    results: dict[Any, Tensor] = {}

    def grouped_mm(call):
        key = (call.x.data_ptr(), call.weight.data_ptr(), call.offsets.data_ptr(), call.x.shape, call.weight.shape)
        if key not in results:
            results[key] = forward(call)
        return results[key].clone()

    return grouped_mm, backward


def _packing(key_of: Any) -> Wrap:
    """A kernel that packs its weights once, as it believes."""

    def wrap(forward, backward):
        packed: dict[Any, Tensor] = {}

        def grouped_mm(call):
            key = key_of(call.weight)
            if key not in packed:
                packed[key] = call.weight.clone()
            return forward(call._replace(weight=packed[key]))

        return grouped_mm, backward

    return wrap


def _layout(weight: Tensor) -> tuple[Any, ...]:
    return weight.shape, weight.dtype, weight.stride(), weight.storage_offset()


for _name, _key in {
    "packed weights are found by their address": lambda w: (w.data_ptr(), *_layout(w)),
    "packed weights are found by the object's number": lambda w: (id(w), w.data_ptr(), *_layout(w)),
    "packed weights are found by a sum of their first numbers": lambda w: (
        float(w.flatten()[:4].double().nan_to_num(7, 8, 9).sum()),
        w.data_ptr(),
        *_layout(w),
    ),
    "packed weights are found by three samples": lambda w: (
        *w.reshape(-1)[[0, w.numel() // 2, -1] if w.numel() else []].double().nan_to_num(7, 8, 9).tolist(),
        w.data_ptr(),
        *_layout(w),
    ),
    "packed weights are found by address and version, which `.data` leaves alone": lambda w: (
        w.data_ptr(),
        0 if w.is_inference() else w._version,
        *_layout(w),
    ),
}.items():
    MUTANTS.append(of_wrapper(_name, "changed_in_place", _packing(_key)))


@fault("backward packs the weight once", "changed_in_place")
def _(forward, backward):
    packed: dict[Any, Tensor] = {}

    def grouped_mm_backward(call, saved, grad):
        key = (call.weight.data_ptr(), *_layout(call.weight))
        return backward(call._replace(weight=packed.setdefault(key, call.weight.clone())), saved, grad)

    return forward, grouped_mm_backward


@fault("offsets are read once for each address", "changed_in_place")
def _(forward, backward):
    read: dict[Any, Tensor] = {}

    def grouped_mm(call):
        key = (call.offsets.data_ptr(), call.offsets.shape, call.x.shape)
        return forward(call._replace(offsets=read.setdefault(key, call.offsets.clone())))

    return grouped_mm, backward


@fault("a workspace has room for the rows of the first call", "after_other_shapes")
def _(forward, backward):
    room: list[int] = []

    def grouped_mm(call):
        room[:] = room or [max(call.x.shape[0], 1)]
        out = forward(call)
        out[room[0] :] = 0
        return out

    return grouped_mm, backward


@fault("the K of the first call is kept", "after_other_shapes")
def _(forward, backward):
    first: list[int] = []

    def grouped_mm(call):
        first[:] = first or [call.x.shape[1]]
        return forward(call._replace(x=call.x[:, : first[0]], weight=call.weight[:, : first[0]]))

    return grouped_mm, backward


@fault(
    "a workspace keeps what a larger call left in it",
    "after_other_shapes",
    at=lambda t: t.case.name == "rows of nobody",
)
def _(forward, backward):
    spaces: dict[torch.dtype, Tensor] = {}

    def grouped_mm(call):
        out = forward(call)
        space = spaces.get(out.dtype)
        if space is None or space.numel() < out.numel():
            space = spaces[out.dtype] = torch.zeros(out.numel(), dtype=out.dtype)
        here = space[: out.numel()].view(out.shape)
        end = int(call.offsets[-1]) if len(call.offsets) else 0
        here[:end] = out[:end]  # rows of nobody were zero in the beginning
        return here.clone()

    return grouped_mm, backward


@fault("a shape keeps the dtype of its first call", "after_other_shapes")
def _(forward, backward):
    first: dict[Any, torch.dtype] = {}

    def grouped_mm(call):
        dtype = first.setdefault((call.x.shape, call.weight.shape), call.x.dtype)
        if dtype.itemsize >= call.x.dtype.itemsize:
            return forward(call)
        return forward(call._replace(x=call.x.to(dtype), weight=call.weight.to(dtype))).to(call.x.dtype)

    return grouped_mm, backward


@fault("what backward needs is kept in one place", "double_use")
def _(forward, backward):
    kept: dict[str, Tensor] = {}

    def grouped_mm(call):
        kept["x"] = call.x.clone()
        return forward(call)

    return grouped_mm, lambda call, saved, grad: backward(call._replace(x=kept["x"]), saved, grad)


@fault("only the first backward of a call is right", "double_use")
def _(forward, backward):
    seen: dict[Any, int] = {}

    def grouped_mm_backward(call, saved, grad):
        key = (call.x.data_ptr(), call.weight.data_ptr())  # the gradient's place is the allocator's whim
        seen[key] = seen.get(key, 0) + 1
        made = backward(call, saved, grad)
        return made if seen[key] == 1 else {name: gradient * 2 for name, gradient in made.items()}

    return forward, grouped_mm_backward


@fault("gradients are added to those of the last call", "double_use")
def _(forward, backward):
    sums: dict[Any, Tensor] = {}

    def grouped_mm_backward(call, saved, grad):
        made = backward(call, saved, grad)
        if "weight" in made:
            key = (call.weight.data_ptr(), call.weight.shape, call.weight.dtype)
            sums[key] = made["weight"] + sums.get(key, 0)
            made["weight"] = sums[key].clone()
        return made

    return forward, grouped_mm_backward


@fault("threads share one workspace", "threads")
def _(forward, backward):
    space: dict[str, Tensor] = {}

    def grouped_mm(call):
        space["out"] = forward(call)
        time.sleep(0.002)
        return space["out"].clone()

    return grouped_mm, backward


@fault("a workspace of inference mode is used in training", "without_gradients")
def _(forward, backward):
    spaces: dict[Any, Tensor] = {}

    def grouped_mm(call):
        key = tuple(call.x.shape)
        if torch.is_inference_mode_enabled() or key in spaces:
            spaces.setdefault(key, torch.ones(key)).mul_(1)
        return forward(call)

    return grouped_mm, backward


@fault("every argument and result is kept", "keeps_nothing_alive")
def _(forward, backward):
    kept: list[Any] = []

    def grouped_mm(call):
        out = forward(call)
        kept.append((call, out))
        return out

    return grouped_mm, backward


@fault("the last result is kept", "keeps_nothing_alive")
def _(forward, backward):
    kept: dict[str, Tensor] = {}

    def grouped_mm(call):
        kept["out"] = forward(call)
        return kept["out"]

    return grouped_mm, backward


@fault("backward keeps every cotangent", "keeps_nothing_alive")
def _(forward, backward):
    kept: list[Tensor] = []

    def grouped_mm_backward(call, saved, grad):
        kept.append(grad)
        return backward(call, saved, grad)

    return forward, grouped_mm_backward


@fault("a copy of every x is kept", "keeps_nothing_alive")
def _(forward, backward):
    kept: list[Tensor] = []

    def grouped_mm(call):
        kept.append(call.x.float())
        return forward(call)

    return grouped_mm, backward
