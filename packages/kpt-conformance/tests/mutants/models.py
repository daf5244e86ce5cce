"""Faults that show only on what models do: their strides, sizes of decoding, long contexts, options, objects.

The right kernels are the references; what is wrong is half as large again, where a call is of one kind.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

import kpt_core
from kpt_optimize.cases import case_tables

from .attention import Attention
from .attention import fault as attention_fault
from .mutant import Mutant

MUTANTS: list[Mutant] = []
When = Callable[[Any], bool]


def reference(op: str) -> Callable[[Any], Any]:
    function = kpt_core.get_op(op).reference
    names = inspect.signature(function).parameters
    return lambda call: function(**{name: getattr(call, name) for name in names})


def right(op: str) -> tuple[tuple[Any, ...], dict[str, object]]:
    """A kernel without a fault, and what is declared of it."""
    return (reference(op),), {"differentiable": True} if case_tables()[op].gradients else {}


def fault(op: str, name: str, found_by: str, when: When, at: Any = "small") -> None:
    """Enter a mutant: wrong where `when` says of a call. `at` is a part of a case's name, or asks of its sizes."""

    def make() -> tuple[Any, ...]:
        function = reference(op)

        def kernel(call: Any) -> Any:
            found, wrong = function(call), when(call)
            if wrong and found is None:  # an op that writes into its arguments
                call.v_cache.zero_()
            spoil = lambda t: t * 1.5 if wrong and t.is_floating_point() and t.itemsize > 1 else t  # noqa: E731
            return tree_map_only(Tensor, spoil, found)

        return (kernel,)

    def likely(trial: Any) -> bool:
        return at in trial.case.name if isinstance(at, str) else bool(at({**_USUAL, **trial.case.sizes}))

    MUTANTS.append(Mutant(name, op, found_by, make, right(op)[1], likely))


#: What a case has that does not say it; as few as no fault asks for.
_USUAL: dict[str, Any] = {"granularity": "", "granularity_a": "", "activations": "", "num_experts": 5, "top_k": 2}
_USUAL |= {"queries": 2, "keys": 2, "rows": 2, "inner": 2, "columns": 2, "tokens": 2, "hidden": 2, "groups": 2}
_USUAL |= {"most_pages": 2, "page_size": 2, "head_dim": 2, "value_dim": 2, "experts": 2}


def turned(tensor: Tensor) -> bool:
    """Heads are nearer to each other in memory than tokens are."""
    sizes, strides = tensor.shape, tensor.stride()
    return tensor.dim() > 2 and min(sizes[-3:-1]) > 1 and 0 < strides[-3] < strides[-2]


def shared(tensor: Tensor | None) -> bool:
    """Whatever is in the second dimension is one memory."""
    return tensor is not None and tensor.dim() > 1 and tensor.shape[1] > 1 and tensor.stride(1) == 0


def cut(tensor: Tensor) -> bool:
    """A slice of longer sequences, whose rows lie side by side."""
    rows, size = tensor.shape[-2:]
    return tensor.dim() == 4 and tensor.shape[1] > 1 and rows > 0 and tensor.stride(1) > 2 * rows * size > 0


DENSE, MERGE, PAGED, UPDATE = (f"attention.{name}" for name in ("dense", "merge", "paged", "update_cache"))

# Layouts
fault(DENSE, "queries with tokens before heads", "layouts", lambda c: turned(c.q) and not turned(c.k))
fault(DENSE, "keys with tokens before heads", "layouts", lambda c: turned(c.k) and not turned(c.q))
fault(DENSE, "everything with tokens before heads", "layouts", lambda c: turned(c.q) and turned(c.k) and turned(c.v))
fault(
    DENSE,
    "slices of a fused projection",
    "layouts",
    lambda c: turned(c.v) and c.v.stride(2) > c.v.shape[1] * c.v.shape[3],
)
fault(DENSE, "keys that heads share", "layouts", lambda c: shared(c.k))
fault(DENSE, "values that heads share", "layouts", lambda c: shared(c.v))
fault(DENSE, "a bias that heads share", "layouts", lambda c: shared(c.bias), "softcap and a bias")
fault(DENSE, "queries of now beside a longer cache", "layouts", lambda c: turned(c.q) and cut(c.k))
fault(PAGED, "queries with tokens before heads", "layouts", lambda c: turned(c.q[None]), "several")
fault(PAGED, "caches with heads before places", "layouts", lambda c: turned(c.k_cache), "a step")
fault(UPDATE, "new keys with heads before tokens", "layouts", lambda c: 1 < c.k.stride(0) < c.k.stride(1), "some rows")
fault("moe.grouped_mm", "matrices of a stack along the rows", "layouts", lambda c: turned(c.weight))
fault("moe.grouped_mm", "rows of matrices that are one memory", "layouts", lambda c: shared(c.weight))
fault("moe.scaled_grouped_mm", "matrices of a stack along the rows", "layouts", lambda c: turned(c.weight))
fault("moe.experts", "matrices of a stack along the rows", "layouts", lambda c: turned(c.gate_up_proj))
fault("moe.experts", "columns of x that are one memory", "layouts", lambda c: shared(c.x))


class Cotangent(Attention):
    """A kernel whose backward is wrong for some cotangents."""

    def of(self, out: Tensor | None, lse: Tensor | None) -> bool:
        raise NotImplementedError

    def backward(self, call: Any, saved: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> dict[str, Tensor]:
        made = super().backward(call, saved, grad_out, grad_lse)
        return {name: grad * 1.5 if self.of(grad_out, grad_lse) else grad for name, grad in made.items()}


@attention_fault("a cotangent with tokens before heads", "cotangents")
class _(Cotangent):
    def of(self, out, lse):
        return out is not None and turned(out)


@attention_fault("a cotangent that is a slice of a projection's", "cotangents")
class _(Cotangent):
    def of(self, out, lse):
        return out is not None and turned(out) and out.stride(2) > out.shape[1] * out.shape[3]


@attention_fault("a cotangent that heads share", "cotangents")
class _(Cotangent):
    def of(self, out, lse):
        return shared(out)


@attention_fault("a cotangent of the log-sum-exp that heads share", "cotangents", at="full")
class _(Cotangent):
    def of(self, out, lse):
        return shared(lse)


# Sizes
def sized(op: str, name: str, when: When, at: Callable[[dict[str, Any]], bool]) -> None:
    fault(op, name, "values", when, at)


sized(
    DENSE,
    "several queries past 513 keys",
    lambda c: c.q.shape[2] > 1 and c.k.shape[2] > 513,
    lambda s: s["queries"] > 1 and s["keys"] > 513,
)
sized(
    DENSE,
    "a query past 1,100 keys",
    lambda c: c.q.shape[2] == 1 and c.k.shape[2] > 1_100,
    lambda s: s["queries"] == 1 and s["keys"] > 1_100,
)
sized(DENSE, "more than 600 queries", lambda c: c.q.shape[2] > 600, lambda s: s["queries"] > 600)
sized(
    DENSE,
    "2 to 16 queries past 1,000 keys",
    lambda c: 1 < c.q.shape[2] <= 16 and c.k.shape[2] > 1_000,
    lambda s: 1 < s["queries"] <= 16 and s["keys"] > 1_000,
)
sized(
    DENSE,
    "wide heads past 1,000 keys",
    lambda c: c.q.shape[3] >= 128 and c.k.shape[2] > 1_000,
    lambda s: s["head_dim"] >= 128 and s["keys"] > 1_000,
)
sized(DENSE, "heads of 576", lambda c: c.q.shape[3] == 576, lambda s: s["head_dim"] == 576)
sized(
    DENSE,
    "narrower values than keys, 128 of 192",
    lambda c: (c.q.shape[3], c.v.shape[3]) == (192, 128),
    lambda s: (s["head_dim"], s["value_dim"]) == (192, 128),
)
sized(MERGE, "more than 600 rows", lambda c: c.out.shape[-3] > 600, lambda s: s["rows"] > 600)
sized(
    PAGED,
    "pages past 1,300 keys without a window",
    lambda c: not c.window and c.block_table.shape[1] * c.k_cache.shape[1] > 1_300,
    lambda s: s["most_pages"] * s["page_size"] > 1_300,
)
sized(
    PAGED,
    "heads of 128 in pages of 16",
    lambda c: c.q.shape[2] == 128 and c.k_cache.shape[1] == 16,
    lambda s: s["head_dim"] == 128 and s["page_size"] == 16,
)
sized(UPDATE, "more than 600 rows", lambda c: c.k.shape[0] > 600, lambda s: s["tokens"] > 600)
sized(UPDATE, "pages of 256", lambda c: c.k_cache.shape[1] == 256, lambda s: s["page_size"] == 256)
for granularity in ("row", "1x128", "1x32", "128x128", "tensor"):
    sized(
        "fp8.quantize",
        f"a few rows past 1,100 columns, one scale for {granularity}",
        lambda c, each=granularity: c.granularity == each and c.x.shape[-2] <= 16 and c.x.shape[-1] > 1_100,
        lambda s, each=granularity: s["granularity"] == each and s["inner"] > 1_100,
    )
sized(
    "fp8.quantize",
    "more than 5 square blocks down",
    lambda c: c.granularity == "128x128" and c.x.shape[-2] > 640,
    lambda s: s["granularity"] == "128x128" and s["rows"] > 640,
)
sized(
    "fp8.dequantize",
    "a row past 2,000 columns",
    lambda c: c.codes.shape[-2] == 1 and c.codes.shape[-1] > 2_000,
    lambda s: s["rows"] == 1 and s["inner"] > 2_000,
)
sized(
    "fp8.scaled_mm",
    "2 to 16 rows past 1,100",
    lambda c: 1 < c.a.shape[0] <= 16 and c.a.shape[1] > 1_100,
    lambda s: 1 < s["rows"] <= 16 and s["inner"] > 1_100,
)
sized(
    "fp8.scaled_mm",
    "blocks of rows past 1,100",
    lambda c: c.granularity_a == "1x128" and c.a.shape[1] > 1_100,
    lambda s: s["granularity_a"] == "1x128" and s["inner"] > 1_100,
)
sized(
    "fp8.scaled_mm",
    "65 rows beside more than 700 columns",
    lambda c: c.a.shape[0] == 65 and c.b.shape[1] > 700,
    lambda s: s["rows"] == 65 and s["columns"] > 700,
)
sized(
    "fp8.linear",
    "a row past 1,100 with activations by row",
    lambda c: c.activations == "row" and c.x.shape[1] > 1_100,
    lambda s: s["activations"] == "row" and s["inner"] > 1_100,
)
sized(
    "fp8.linear",
    "more than 600 rows past 1,100",
    lambda c: c.x.shape[0] > 600 and c.x.shape[1] > 1_100,
    lambda s: s["rows"] > 600 and s["inner"] > 1_100,
)
sized(
    "moe.experts",
    "one token wider than 2,048",
    lambda c: c.x.shape[0] == 1 and c.x.shape[1] > 2_048,
    lambda s: s["tokens"] == 1 and s["hidden"] > 2_048,
)
sized(
    "moe.experts",
    "5 to 16 tokens wider than 2,048",
    lambda c: 5 <= c.x.shape[0] <= 16 and c.x.shape[1] > 2_048,
    lambda s: 5 <= s["tokens"] <= 16 and s["hidden"] > 2_048,
)
sized(
    "moe.experts",
    "128 experts wider than 2,048",
    lambda c: c.gate_up_proj.shape[0] >= 128 and c.x.shape[1] > 2_048,
    lambda s: s["num_experts"] >= 128 and s["hidden"] > 2_048,
)
for least, most in ((5, 7), (9, 16)):
    sized(
        "moe.experts",
        f"{least} to {most} choices",
        lambda c, few=least, many=most: few <= c.top_k_index.shape[1] <= many < c.gate_up_proj.shape[0],
        lambda s, few=least, many=most: s["top_k"] in range(few, many + 1),
    )
    sized(
        "moe.top_k_gating",
        f"{least} to {most} choices",
        lambda c, few=least, many=most: few <= c.top_k <= many < c.logits.shape[1],
        lambda s, few=least, many=most: s["top_k"] in range(few, many + 1),
    )
sized(
    "moe.top_k_gating",
    "one token of 256 experts",
    lambda c: c.logits.shape[0] == 1 and c.logits.shape[1] >= 256,
    lambda s: s["tokens"] == 1 and s["experts"] == 256,
)
sized(
    "moe.top_k_gating",
    "experts that are no power of two in groups",
    lambda c: c.logits.shape[1] == 160 and c.num_groups == 8,
    lambda s: s["experts"] == 160,
)
sized(
    "moe.grouped_mm",
    "more than 16,384 rows of 16 bits",
    lambda c: c.x.shape[0] > 16_384 and c.x.itemsize == 2,
    lambda s: s["rows"] > 16_384,
)
sized("moe.grouped_mm", "sums longer than 4,097", lambda c: c.x.shape[1] > 4_097, lambda s: s["inner"] > 4_097)
sized(
    "moe.grouped_mm",
    "8 rows past 2,000, in 32 groups",
    lambda c: c.weight.shape[0] == 32 and c.x.shape[1] > 2_000,
    lambda s: s["groups"] == 32 and s["inner"] > 2_000,
)
sized(
    "moe.scaled_grouped_mm",
    "blocks past 2,000",
    lambda c: c.scale.dim() == 3 and min(c.scale.shape[1:]) > 1 and c.x.shape[1] > 2_000,
    lambda s: s["inner"] > 2_000,
)
