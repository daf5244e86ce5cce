"""Faults that show only on what models do: options of families, seeds, long sums, objects, and what lies in padding."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .attention import Attention
from .attention import fault as attention_fault
from .models import DENSE, MERGE, MUTANTS, PAGED, fault, reference, right, sized
from .mutant import Mutant

__all__ = ["MUTANTS"]

# Options
for shape in ("B1QK", "11QK", "1HQK", "B11K"):
    sized(
        DENSE,
        f"a bias of {shape}",
        lambda c, each=shape: (
            c.bias is not None
            and min(c.q.shape[:3]) > 1
            and [size == 1 for size in c.bias.shape] == [letter == "1" for letter in each]
        ),
        lambda s, each=shape: s.get("shape") == each and s.get("added") == "bias",
    )
sized(
    DENSE,
    "a bias of float32 beside 16 bits",
    lambda c: c.bias is not None and c.bias.dtype is torch.float32 and c.q.itemsize == 2,
    lambda s: s.get("added_dtype") is torch.float32,
)
sized(
    DENSE,
    "slopes of float32 beside 16 bits",
    lambda c: c.alibi_slopes is not None and c.alibi_slopes.dtype is torch.float32 and c.q.itemsize == 2,
    lambda s: s.get("added_dtype") is torch.float32 and s.get("added") == "alibi",
)
sized(DENSE, "a softcap past 10", lambda c: c.softcap > 10, lambda s: s.get("softcap", 0) > 10)
sized(DENSE, "a scale of one", lambda c: c.scale == 1.0, lambda s: s.get("scale") == 1.0)
sized(
    DENSE,
    "a window of 130",
    lambda c: c.intervals is not None and (c.intervals[..., 1] - c.intervals[..., 0]).max() == 130,
    lambda s: s.get("window", 0) == 130,
)
sized(
    DENSE,
    "a window of 128 and sinks",
    lambda c: (
        c.sinks is not None and c.intervals is not None and (c.intervals[..., 1] - c.intervals[..., 0]).max() == 128
    ),
    lambda s: s.get("window", 0) == 128,
)
sized(
    DENSE,
    "relative positions past 5",
    lambda c: c.relative_bias is not None and c.relative_bias.shape[1] > 11,
    lambda s: s.get("reach", 0) > 5,
)
sized(MERGE, "a batch of rows", lambda c: c.out.dim() == 4, lambda s: s.get("stacked") == (2,))
sized(
    MERGE,
    "statistics of float32 beside 16 bits",
    lambda c: c.lse.dtype is torch.float32 and c.out.itemsize == 2,
    lambda s: s.get("lse_dtype") is torch.float32,
)
sized(PAGED, "a window past 100", lambda c: c.window > 100, lambda s: s.get("window", 0) > 100)
sized(PAGED, "a softcap past 10", lambda c: c.softcap > 10, lambda s: s.get("softcap", 0) > 10)
sized(
    PAGED,
    "the first keys beside a long window",
    lambda c: c.first and c.block_table.shape[1] > 64,
    lambda s: s.get("first") and s["most_pages"] > 64,
)
sized(
    PAGED,
    "8 bits for 8 heads of queries",
    lambda c: c.k_cache.itemsize == 1 and c.q.shape[1] == 8 * c.k_cache.shape[2],
    lambda s: s["groups"] == 8 and s.get("cache") is not None,
)


class Seeded(Attention):
    """A kernel whose backward draws other random numbers than its forward for some seeds."""

    def refund(self, call: Any) -> float:
        return super().refund(call) * (1.5 if self.backwards and self.of(call.seed) else 1.0)

    backwards = False

    def of(self, seed: int) -> bool:
        raise NotImplementedError

    def backward(self, *given: Any) -> dict[str, Tensor]:
        self.backwards = True
        try:
            return super().backward(*given)
        finally:
            self.backwards = False


@attention_fault("negative seeds in backward", at="drawn")
class _(Seeded):
    def of(self, seed):
        return seed < 0


@attention_fault("seeds past 32 bits in backward", at="drawn")
class _(Seeded):
    def of(self, seed):
        return seed >= 2**32


# Accumulation
@attention_fault("gradients of values are summed in the dtype, past 1,024 queries", at="queries 2049")
class _(Attention):
    def of_values(self, weights, drop, given):
        whole = super().of_values(weights, drop, given)
        if given.shape[2] <= 1_024:
            return whole
        total = torch.zeros_like(whole)
        for start in range(0, given.shape[2], 64):
            rows = slice(start, start + 64)
            total = total + super().of_values(weights[:, :, rows], 1.0, given[:, :, rows]).bfloat16().to(total.dtype)
            total = total.bfloat16().to(total.dtype)
        return total


# Objects
class Needs(Attention):
    """A kernel that is wrong where some gradients are asked for, and others are not."""

    def of(self, needs: tuple[str, ...], out: Tensor | None, lse: Tensor | None) -> bool:
        raise NotImplementedError

    def backward(self, call: Any, saved: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> dict[str, Tensor]:
        made = super().backward(call, saved, grad_out, grad_lse)
        wrong = self.of(tuple(call.needs), grad_out, grad_lse)
        return {name: grad * 1.5 if wrong else grad for name, grad in made.items()}


@attention_fault("gradients of queries and values without those of keys", "objects")
class _(Needs):
    def of(self, needs, out, lse):
        return needs == ("q", "v")


def still(grad: Tensor | None) -> bool:
    return grad is None or not grad.any()


@attention_fault("gradients of the log-sum-exp alone", "objects", at="full")
class _(Needs):
    def of(self, needs, out, lse):
        return still(out) and lse is not None


@attention_fault("gradients of the output alone, beside a log-sum-exp", "objects", at="full")
class _(Needs):
    def of(self, needs, out, lse):
        return still(lse) and out is not None


class InThread(Attention):
    """A kernel that keeps what its backward needs with the thread that ran forward."""

    def forward(self, call: Any) -> Any:
        self.thread = threading.get_ident()
        return super().forward(call)

    def backward(self, call: Any, saved: Any, *pulls: Tensor | None) -> dict[str, Tensor]:
        made = super().backward(call, saved, *pulls)
        return made if threading.get_ident() == self.thread else {n: torch.zeros_like(g) for n, g in made.items()}


attention_fault("backward in another thread finds nothing", "objects")(InThread)


def keeping(op: str, name: str, argument: str, held: Callable[[dict[int, Any], Tensor], Tensor]) -> None:
    """Enter a mutant that keeps something of a parameter by its identity."""

    def make() -> tuple[Any, ...]:
        function, kept = reference(op), {}

        def kernel(call: Any) -> Any:
            tensor = getattr(call, argument)
            return function(call._replace(**{argument: held(kept, tensor)}))

        return (kernel,)

    MUTANTS.append(Mutant(name, op, "objects", make, right(op)[1], lambda trial: "small" in trial.case.name))


def _by_identity(kept: dict[int, Any], tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor
    known, values = kept.setdefault(id(tensor), (tensor, tensor.detach().clone()))
    return tensor + (values - known.detach())  # the values of then, the gradients of now


def _by_version(kept: dict[int, Any], tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor
    if id(tensor) not in kept or kept[id(tensor)][0] != tensor._version:
        kept[id(tensor)] = tensor._version, tensor.detach().clone()
    return tensor + (kept[id(tensor)][1] - tensor.detach())


keeping("moe.experts", "a parameter's first values are kept", "x", _by_identity)
keeping("moe.grouped_mm", "a parameter's first values are kept", "weight", _by_identity)
keeping("moe.grouped_mm", "a parameter is kept until its version changes", "weight", _by_version)


def same_memory(one: Tensor, other: Tensor) -> bool:
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


fault(
    DENSE,
    "keys and values in one memory",
    "objects",
    lambda c: same_memory(c.k, c.v) and c.k.data_ptr() != c.v.data_ptr(),
)
fault(DENSE, "keys that are the values", "objects", lambda c: c.k.numel() > 0 and c.k.data_ptr() == c.v.data_ptr())
fault("moe.experts", "x that is no leaf", "objects", lambda c: c.x.grad_fn is not None)
fault(
    MERGE,
    "both outputs in one memory",
    "objects",
    lambda c: same_memory(c.out, c.other_out) and c.out.data_ptr() != c.other_out.data_ptr(),
)


# Padding
def _reads_on(call: Any) -> bool:
    """A page that is not full has something that is no number where nobody may read."""
    size = call.k_cache.shape[1]
    partly = (call.lengths % size != 0).any() and size > 8
    return bool(partly and call.v_cache.dtype.itemsize > 1 and call.v_cache.isnan().any())


fault(PAGED, "what is left in a page of more than 8 is read", "padding", _reads_on, lambda s: s["page_size"] > 8)
fault(
    DENSE,
    "values that nobody sees, of more than 64, are read",
    "padding",
    lambda c: c.k.shape[2] > 64 and c.v.isnan().any(),
    lambda s: s["keys"] > 64,
)
