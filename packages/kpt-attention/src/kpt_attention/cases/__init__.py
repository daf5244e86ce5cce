"""What the ops of this package are tried on, for the entry-point group `kpt.cases`."""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kpt_attention.dense import dense
from kpt_attention.mask_algebra import Mask
from kpt_attention.masks import (
    causal,
    dense_mask,
    document,
    everything,
    global_tokens,
    padding,
    predicate,
    prefix_lm,
    sliding_window,
    window,
)
from kpt_attention.plan import BLOCK, allowed_keys
from kpt_optimize.cases import Accuracy, Arguments, Case, CaseTable, Domain, Sizes, WrongInput

#: Masks that are tried, by what they lower to: nothing, causality, one interval, several, blocks; alike for all
#: sequences and heads or not; with rows that see nothing or without.
MASKS = ("none", "causal", "window", "documents", "padding", "two intervals", "blocks", "blocks by head", "nothing")


#: Shapes of a bias [batch, heads, queries, keys], by the dimensions that it has.
_BIASES = ("BHQK", "B1QK", "11QK", "1HQK", "B11K", "1H1K")


def _mask(
    generator: torch.Generator, kind: str, batch: int, heads: int, queries: int, keys: int, size: int = 19
) -> Mask:
    if kind == "documents":
        ids = (torch.rand(batch, keys, generator=generator) < 3 / (keys + 1)).long().cumsum(1)
        return (causal() & document(ids)) if queries <= keys else prefix_lm(torch.arange(batch) * 3 + 1)
    if kind == "padding":  # on the left, so that the first rows of causal attention see nothing
        least = torch.randint(0, keys // 2 + 1, (batch,), generator=generator)
        return causal() & padding(torch.arange(keys) >= least[:, None])
    if kind == "blocks":
        whole = predicate(lambda b, h, q, k: (k < BLOCK) & (q >= BLOCK))  # blocks that are full, in long sequences
        return sliding_window(70) & predicate(lambda b, h, q, k: (q * 7 + k * k) % 5 < 3) | whole
    if kind == "blocks by head":
        return dense_mask(torch.rand(batch, heads, queries, keys, generator=generator) < 0.4)
    masks: dict[str, Callable[[], Mask]] = {
        "none": everything,
        "causal": causal,
        "window": lambda: sliding_window(size),
        "both sides": lambda: window(size, size),
        "two intervals": lambda: sliding_window(7) | global_tokens(2),
        "nothing": lambda: ~everything(),
    }
    return masks[kind]()


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64) * scale


def _build(
    generator: torch.Generator,
    batch: int = 2,
    kv_heads: int = 2,
    groups: int = 1,
    queries: int = 24,
    keys: int = 24,
    head_dim: int = 8,
    value_dim: int = 8,
    mask: str = "none",
    added: str | None = None,
    shape: str = "BHQK",
    reach: int = 5,
    added_dtype: torch.dtype = torch.float64,
    sinks: bool = False,
    drawn: bool = False,
    return_lse: bool = True,
    place: str = "end",
    window: int = 19,
    **settings: Any,
) -> Arguments:
    heads = kv_heads * groups
    q = _normal(generator, batch, heads, queries, head_dim)
    k = _normal(generator, batch, kv_heads, keys, head_dim)
    v = _normal(generator, batch, kv_heads, keys, value_dim)
    position = keys - queries if place == "end" else 0
    plan = _mask(generator, mask, batch, heads, queries, keys, window).plan(
        queries,
        keys,
        batch=batch,
        heads=heads,
        offset=position if mask != "documents" or queries > keys else keys - queries,
    )
    given = {name: value for name, value in plan.arguments(queries, keys).items() if value is not None}
    if "blocks" in given and keys % 2:  # what lies beyond the sizes is not looked at
        given["blocks"] = torch.nn.functional.pad(given["blocks"], (0, 1, 0, 1), value=1)
    modifiers: dict[str, Tensor] = {}
    if added == "bias":
        whole = {"B": batch, "H": heads, "Q": queries, "K": keys, "1": 1}
        modifiers["bias"] = _normal(generator, *(whole[each] for each in shape))
    elif added == "alibi":
        modifiers["alibi_slopes"] = torch.rand(heads, generator=generator, dtype=torch.float64) / 4
    elif added == "relative":
        modifiers["relative_bias"] = _normal(generator, heads, 2 * reach + 1)
    if sinks:
        modifiers["sinks"] = _normal(generator, heads)
    # Other than float64 it stays as it is beside q, k and v of 16 bits.
    modifiers = {name: tensor.to(added_dtype) for name, tensor in modifiers.items()}
    if drawn:
        modifiers["drawn_seed"] = torch.randint(-20, 20, (), generator=generator)
    return {"q": q, "k": k, "v": v, **given, **modifiers, "return_lse": return_lse, **settings}


def _allowed(arguments: Arguments) -> Tensor | None:
    """Return which keys the queries that read a head of keys may see, `[B, Hkv, groups, Q, K]`; None for all."""
    q, k = arguments["q"], arguments["k"]
    allowed = allowed_keys(dense.bind(**arguments), range(q.shape[2]), range(k.shape[2]), q.device)
    if allowed is None:
        return None
    every: Tensor = allowed.expand(*q.shape[:2], *allowed.shape[2:]).unflatten(1, (k.shape[1], -1))
    return every


def _unseen(arguments: Arguments) -> Mapping[str, Tensor]:
    """Mark what has no influence: the keys and values that no query of any head of theirs may see."""
    allowed = _allowed(arguments)
    return {} if allowed is None else dict.fromkeys(("k", "v"), ~allowed.any((2, 3)).unsqueeze(-1))


def _specified(arguments: Arguments) -> bool:
    """Return False where a key with NaN or inf is seen by some queries alone: tiles may spread it to the others."""
    allowed = _allowed(arguments)
    if allowed is None:
        return True
    wild = ~(arguments["k"].isfinite().all(-1) & arguments["v"].isfinite().all(-1))
    return not bool((wild & allowed.any((2, 3)) & ~allowed.all((2, 3))).any())


def _case(name: str, *, model: bool = False, large: bool = False, **sizes: Any) -> Case:
    return Case(name=name, sizes=sizes, model=model, large=large)


def _wrong(op: str, name: str, message: str, **changes: Callable[[Any], Any]) -> WrongInput:
    def change(arguments: Arguments) -> Arguments:
        return {**arguments, **{name: changed(arguments.get(name)) for name, changed in changes.items()}}

    return WrongInput(name=name, change=change, message=f"{re.escape(op)}: {message}")


_LLAMA: dict[str, Any] = {
    "kv_heads": 8,
    "groups": 4,
    "head_dim": 64,
    "value_dim": 64,
    "mask": "causal",
    "return_lse": False,
}


_OPTIONS: dict[str, tuple[Any, ...]] = {
    "mask": MASKS,
    "added": (None, "bias", "alibi", "relative"),
    "shape": _BIASES,
    "reach": (5, 33),
    "added_dtype": (torch.float64, torch.float32),
    "sinks": (False, True),
    "return_lse": (True, False),
    "place": ("end", "start"),
    "window": (19, 130),
    "softcap": (0.0, 2.0),
    "scale": (None, 0.2),
    "dropout": (0.0, 0.25),
    "seed": (0, -3, 2**40 + 7),
    "drawn": (False, True),
    "offset": (0, 3),
}


def _family(queries: int, keys: int, dims: int | tuple[int, int] = 64, **sizes: Any) -> dict[str, Any]:
    head_dim, value_dim = (dims, dims) if isinstance(dims, int) else dims
    usual = {"batch": 1, "kv_heads": 1, "mask": "causal", "return_lse": False}
    return {**usual, "queries": queries, "keys": keys, "head_dim": head_dim, "value_dim": value_dim, **sizes}


#: One layer of each, of few heads; scales and windows are the models' own.
_FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma 2": _family(40, 170, 256, groups=2, mask="window", window=130, softcap=50.0, scale=256**-0.5),
    "Gemma 2, a step": _family(1, 600, 256, groups=2, softcap=50.0, scale=256**-0.5),
    "Gemma 3": _family(40, 600, 256, groups=2, mask="window", window=512, scale=256**-0.5),
    "T5, encoder": _family(70, 70, batch=2, groups=2, mask="none", added="bias", shape="1HQK", scale=1.0),
    "T5, decoder": _family(9, 40, groups=2, added="bias", shape="1HQK", scale=1.0),
    "T5, across": _family(9, 70, batch=2, mask="none", added="bias", shape="B11K", scale=1.0),
    "BERT": _family(33, 33, batch=3, kv_heads=3, mask="none", added="bias", shape="B11K"),
    "Swin": _family(49, 49, 32, batch=4, kv_heads=3, mask="none", added="bias", shape="1HQK"),
    "MPT": _family(40, 70, kv_heads=4, added="alibi", added_dtype=torch.float32),
    "DeepSeek-V3": _family(33, 65, (192, 128), kv_heads=2, scale=0.1352),
    "DeepSeek-V3, a step": _family(1, 300, (192, 128), kv_heads=4, scale=0.1352),
    "DeepSeek-V3, latent": _family(1, 300, (576, 512), groups=16, scale=0.1352),
    "gpt-oss": _family(70, 200, groups=8, mask="window", window=128, sinks=True),
    "gpt-oss, a step": _family(1, 200, groups=8, sinks=True),
    "Qwen3-MoE": _family(33, 65, 128, groups=8),
    "Llama 4": _family(70, 70, 128, groups=5, mask="documents"),
    "GraniteMoe": _family(33, 65, groups=3, scale=0.015625),
    "ModernBERT": _family(150, 150, batch=2, kv_heads=2, mask="both sides", window=64),
    "Whisper, encoder": _family(1_500, 1_500, mask="none"),
    "Whisper, across": _family(3, 1_500, kv_heads=6, mask="none"),
}


def _affordable(values: Mapping[str, Any]) -> bool:
    """Return whether q, k and v, a bias, or the bits of blocks of each head, are no more than millions of numbers.

    Nor has anything a shape, a dtype or a size of what is not there.
    """
    parts = {"shape": values["added"] == "bias", "reach": values["added"] == "relative"}
    parts |= {"window": values["mask"] == "window", "added_dtype": bool(values["added"] or values["sinks"])}
    if any(values[name] != _OPTIONS[name][0] and not there for name, there in parts.items()):
        return False
    heads, queries, keys, kv_heads, head_dim, value_dim = (
        math.prod(values.get(size, 1) for size in sizes.split())
        for sizes in ("batch kv_heads groups", "queries", "keys", "batch kv_heads", "head_dim", "value_dim")
    )
    blocks = heads * -(-queries // BLOCK) * -(-keys // BLOCK) if values["mask"] == "blocks by head" else 0
    rows = heads * queries * head_dim + kv_heads * keys * (head_dim + value_dim)
    return heads * queries * keys <= 4_200_000 and blocks <= 1_000 and rows <= 3_000_000


_dense, _merge = (partial(_wrong, f"attention.{name}") for name in ("dense", "merge"))

# fmt: off
DENSE = CaseTable(
    op="attention.dense",
    build=_build,
    cases=(
        _case("small", return_lse=False),
        _case("full", return_lse=True),
        _case("causal", mask="causal"),
        _case("causal, output alone", mask="causal", return_lse=False, batch=5),
        _case("no tokens", queries=0, keys=0, mask="causal"),
        _case("no keys", keys=0),
        _case("no queries", queries=0),
        _case("one token", queries=1, keys=1, mask="causal"),
        _case("63 tokens, odd sizes", queries=63, keys=63, head_dim=5, value_dim=7, batch=1, mask="causal"),
        _case("decode", queries=1, keys=131, groups=4, mask="causal"),
        _case("decode, output alone", queries=1, keys=131, groups=4, mask="causal", return_lse=False),
        _case("decode past many keys, left padding", queries=1, keys=1100, groups=3, mask="padding"),
        _case("decode past many keys, sinks and softcap", queries=1, keys=300, groups=2, sinks=True, softcap=2.0),
        _case("a few queries of many keys", queries=5, keys=300, mask="causal", return_lse=False),
        _case("a few queries of few keys", queries=5, keys=40, groups=2, mask="causal", return_lse=False),
        _case("a few queries of few keys from the start", queries=5, keys=40, mask="causal", place="start"),
        _case("groups of heads, output alone", queries=33, keys=33, groups=3, mask="causal", return_lse=False),
        _case("groups of heads, full, output alone", queries=9, keys=40, groups=3, return_lse=False),
        _case("past a block", queries=129, keys=257, batch=1, kv_heads=1, mask="causal"),
        _case("causal from the start", queries=40, keys=70, mask="causal", place="start", return_lse=False),
        _case("more queries than keys", queries=40, keys=24, mask="causal"),
        _case("window", queries=150, keys=150, batch=1, mask="window"),
        _case("documents", queries=50, keys=50, mask="documents"),
        _case("left padding", queries=40, keys=40, mask="padding"),
        _case("two intervals", queries=140, keys=140, batch=1, kv_heads=1, mask="two intervals"),
        _case("blocks", queries=140, keys=271, batch=1, mask="blocks"),
        _case("blocks by head", queries=30, keys=140, groups=2, mask="blocks by head"),
        _case("nothing seen", mask="nothing"),
        _case("nothing seen but the sink", mask="nothing", sinks=True),
        _case("softcap", softcap=1.5, mask="causal"),
        _case("softcap and a bias", softcap=1.5, mask="causal", added="bias", groups=2),
        _case("bias of keys", added="bias", shape="1H1K", groups=2),
        _case("alibi", added="alibi", mask="causal", queries=17, keys=30),
        _case("relative bias", added="relative", groups=2),
        _case("sinks", sinks=True, mask="window", groups=2),
        _case("scaled", scale=0.7),
        _case("dropout", dropout=0.3, seed=5, offset=3, groups=2, mask="causal"),
        _case("dropout of a drawn seed", dropout=0.3, seed=5, drawn=True),
        _case("llama-3.2-1b, 512 tokens", queries=512, keys=512, batch=1, **_LLAMA, model=True),
        _case("llama-3.2-1b, decode", queries=1, keys=1024, batch=1, **_LLAMA, model=True),
        _case("llama-3.2-1b, 8192 tokens", queries=8192, keys=8192, batch=1, **_LLAMA, model=True, large=True),
    ),
    wrong=(
        _dense("one dimension too many",
            r"q, k and v must be \[batch, heads, tokens, head_dim\]; got q \[1, 2, 2, 24, 8\]", q=lambda t: t[None]),
        _dense("two dtypes", r"q, k and v must have one dtype .*; got torch\.float64, ", q=Tensor.double),
        _dense("integers", r"q, k and v must have one dtype .*; got torch\.int32",
            q=Tensor.int, k=Tensor.int, v=Tensor.int),
        _dense("heads that do not divide", r"heads of k and v \(2\) must divide those of q \(3\)",
            q=lambda t: t[:, :1].repeat(1, 3, 1, 1)),
        _dense("another head_dim", r"q and k must have one head_dim", q=lambda t: t[..., 1:]),
        _dense("fewer values than keys",
            r"q, k and v must have one batch size, k and v as many heads and tokens; got .* v \[2, 2, 23, 8\]",
            v=lambda t: t[:, :, 1:]),
        _dense("intervals of another length",
            r"intervals must be int32 \[2 or 1, 2 or 1, 24, n, 2\]; "
            r"got torch\.int32 \[1, 1, 23, 1, 2\]",
            intervals=lambda _: torch.zeros((1, 1, 23, 1, 2), dtype=torch.int32)),
        _dense("blocks without bits", r"blocks and block_bits belong together",
            blocks=lambda _: torch.zeros((1, 1, 1, 1), dtype=torch.int32)),
        _dense("a bias of another length",
            r"bias must be floating and broadcast to \[2, 2, 24, 24\]; got torch\.float32 \[1, 1, 24, 23\]",
            bias=lambda _: torch.zeros(1, 1, 24, 23)),
        _dense("a bool bias", r"bias must be floating .*a bool mask is kpt_attention\.dense_mask",
            bias=lambda _: torch.ones(1, 1, 24, 24, dtype=torch.bool)),
        _dense("slopes of other heads", r"alibi_slopes must be floating \[2\]; got torch\.float32 \[3\]",
            alibi_slopes=lambda _: torch.zeros(3)),
        _dense("an even table", r"relative_bias must be floating \[2, 2 R \+ 1\]",
            relative_bias=lambda _: torch.zeros(2, 4)),
        _dense("dropout of everything", r"dropout must be in \[0, 1\); got 1\.0", dropout=lambda _: 1.0),
        _dense("a negative softcap", r"softcap must be positive, or 0 for none; got -1\.0",
            softcap=lambda _: -1.0),
        _dense("two devices", r"all tensors must be on one device; got .*sinks on meta",
            sinks=lambda _: torch.zeros(2, device="meta")),
    ),
    gradients=("q", "k", "v", "bias", "alibi_slopes", "relative_bias", "sinks"),
    # Matrix units take probabilities and gradients of scores in the inputs' dtype, as FlashAttention-2's backward does;
    # the reference rounds other factors. On average that is hardly worse, but the worst element of a few thousand is;
    # and where all keys weigh alike (q and k small) every key has the same error, so that the average is of few.
    # Nor does a rounding of what all keys' changes have in common cancel: it is summed over output times cotangent, as
    # in FlashAttention-2, where the reference sums the very changes that it is taken from. In float32 that shows where
    # one key has nearly all the weight.
    tolerances={
        **{f"gradient of {name}": Accuracy(1.4, 3.0, "both factors of its products are rounded") for name in "qk"},
        "gradient of bias": Accuracy(1.1, 3.0, "what the changes of a row have in common is summed over the output"),
    },
    padding=_unseen,
    linear_in=("queries", "keys"),
    specified=_specified,
    reduction=lambda arguments: max(
        *arguments["q"].shape[2:], *arguments["k"].shape[2:],
        arguments["q"].shape[1] // arguments["k"].shape[1] * arguments["q"].shape[2],
    ),
    rare=(torch.float64,),
    domain=Domain(
        sizes={
            "batch": Sizes(), "kv_heads": Sizes(1), "groups": Sizes(1, usual=(4, 7)),
            "queries": Sizes(usual=(1, 4, 65, 2_049)), "keys": Sizes(usual=(65, 1_537, 2_049)),
            "head_dim": Sizes(1, usual=(64, 128, 256)), "value_dim": Sizes(1, usual=(64, 128)),
        },
        options=_OPTIONS,
        seldom=("shape", "reach", "added_dtype", "window"),
        families=_FAMILIES,
        allowed=_affordable,
    ),
)


def _build_merge(
    generator: torch.Generator,
    rows: int = 12,
    heads: int = 3,
    value_dim: int = 8,
    dead: str = "none",
    stacked: tuple[int, ...] = (),
    lse_dtype: torch.dtype = torch.float64,
) -> Arguments:
    shape = (*stacked, rows, heads)
    lse, other = (_normal(generator, *shape, scale=3).to(lse_dtype) for _ in range(2))
    some = torch.rand(shape, generator=generator) < 0.4
    if dead in ("one", "both"):
        lse = lse.masked_fill(some, -torch.inf)
    if dead == "both":
        other = other.masked_fill(some, -torch.inf)
    out, other_out = (_normal(generator, *shape, value_dim) for _ in range(2))
    return {"out": out, "lse": lse, "other_out": other_out, "other_lse": other}


# fmt: off
MERGE = CaseTable(
    op="attention.merge",
    build=_build_merge,
    cases=(
        _case("small"),
        _case("no rows", rows=0),
        _case("one row", rows=1, heads=1),
        _case("63 rows", rows=63, value_dim=5),
        _case("rows that one part does not see", dead="one"),
        _case("rows that nobody sees", dead="both"),
        _case("llama-3.2-1b, a step of decoding", rows=1, heads=32, value_dim=64, model=True),
    ),
    wrong=(
        _merge("two shapes", r"both outputs must have one shape.*got other_out \[11, 3, 8\]",
            other_out=lambda t: t[1:]),
        _merge("integers",
            r"outputs must have one floating dtype, and log-sum-exps a floating one; got out .* lse torch\.int32",
            lse=Tensor.int),
        _merge("two devices", r"all tensors must be on one device; got out on cpu and other_out on meta",
            other_out=lambda t: t.to("meta")),
    ),
    gradients=("out", "lse", "other_out", "other_lse"),
    rare=(torch.float64,),
    domain=Domain(
        sizes={
            "rows": Sizes(usual=(4, 2_049)), "heads": Sizes(1, usual=(32,)), "value_dim": Sizes(1, usual=(64, 512)),
        },
        options={
            "dead": ("none", "one", "both"),
            "stacked": ((), (2,)),
            "lse_dtype": (torch.float64, torch.float32),  # float32 as a rule, whatever the outputs are
        },
        allowed=lambda values: math.prod(
            (*values["stacked"], *(values.get(name, 1) for name in ("rows", "heads", "value_dim")))
        ) <= 2_500_000,
    ),
)
# fmt: on

TABLES = (DENSE, MERGE)
