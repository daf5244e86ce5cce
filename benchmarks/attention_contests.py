"""Attention as contests: KPT beside torch's SDPA and compiled FlexAttention, on the same tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from devices import Work
from harness import Contest, Contestant, Role
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kpt_attention import Mask, PagedCache, attention, causal, document, everything, sliding_window
from kpt_attention.paged import paged

#: Attends to queries, keys and values.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
MASKS = ("causal", "full", "documents", "window", "ALiBi", "bias")


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of attention: tokens, heads of queries, heads of keys and values, numbers of a head."""

    name: str
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int


def mask_of(kind: str, tokens: int, device: torch.device) -> Mask:
    """Return a mask of `MASKS`: documents are uneven ones, a window is an eighth of the tokens, ALiBi is causal."""
    if kind == "documents":
        shares = torch.tensor([0, 0.07, 0.19, 0.2, 0.55, 0.9, 1])
        return causal() & document(cu_seqlens=(shares * tokens).round().int().to(device))
    if kind == "window":
        return sliding_window(max(tokens // 8, 1))
    return causal() if kind in ("causal", "ALiBi") else everything()


def added_to(heads: Heads, kind: str, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Return what KPT is given to add to the scores under a mask of `MASKS`, and the same as `[heads, tokens, tokens]`.

    That is nothing but for `ALiBi` and for `bias`, which has a number of `dtype` for each head, query and key.
    """
    place = torch.arange(heads.tokens, device=device)
    if kind == "ALiBi":
        slopes = 2.0 ** (-8 * torch.arange(1, heads.heads + 1, device=device) / heads.heads)
        return {"alibi_slopes": slopes}, -slopes[:, None, None] * (place - place[:, None]).abs()
    if kind == "bias":
        bias = (place * 0.37 + place[:, None] * 0.11).sin().to(dtype).expand(heads.heads, -1, -1).contiguous()
        return {"bias": bias[None]}, bias
    return {}, torch.zeros(1, device=device).expand(heads.heads, 1, 1)


def attention_contest(
    heads: Heads,
    kind: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    *,
    training: bool = False,
    compiler: str = "inductor",
) -> Contest:
    """Make a contest of self-attention under a mask of `MASKS`: a forward, or a training step.

    Args:
        heads: sizes.
        kind: of the mask.
        dtype: of queries, keys and values.
        device: where it runs.
        seed: of the numbers.
        training: the gradients of all three are computed too.
        compiler: of FlexAttention.
    """
    tokens, mask = heads.tokens, mask_of(kind, heads.tokens, device)
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v, pull = (
        torch.empty(1, count, tokens, heads.head_dim, dtype=dtype, device=device).normal_(generator=generator)
        for count in (heads.heads, heads.kv_heads, heads.kv_heads, heads.heads)
    )
    leaves = [tensor.requires_grad_(training) for tensor in (q, k, v)]
    plan, dense = mask.plan(tokens, device=device), mask.dense(tokens)[0, 0].to(device)
    group = heads.heads // heads.kv_heads
    given, added = added_to(heads, kind, dtype, device)
    exact = _exact([tensor[:, :count].detach() for tensor, count in ((q, group), (k, 1), (v, 1))], dense,
                   pull[:, :group] if training else None, added[:group].double())  # fmt: skip

    def contestant(name: str, role: Role, attend: Attention) -> Contestant:
        def call() -> list[Tensor]:
            return _step(attend, leaves, pull if training else None)

        def check() -> list[Tensor]:
            return [tensor[:, : group if n in (0, 1) else 1] for n, tensor in enumerate(call())]

        return Contestant(name, role, dtype, [call], check, exact)

    ours = contestant("kpt", "kpt", lambda q, k, v: attention(q, k, v, plan, **given))
    seen = added.to(dtype).masked_fill(~dense, float("-inf"))[None] if given else dense
    peers = [contestant("SDPA", "peer", _sdpa(kind, seen))]
    if device.type == "cuda" and kind in ("causal", "full"):
        peers.append(contestant("SDPA, cuDNN", "peer", _by_cudnn(_sdpa(kind, dense))))
    if device.type != "cpu" or not training:  # it has no backward on CPUs
        peers.append(contestant("FlexAttention", "peer", _flex(dense, compiler, given)))
    pairs = int(dense.sum()) * heads.heads
    moved = sum(tensor.nbytes for tensor in (q, q, k, v))
    return Contest(
        group="attention step" if training else "attention",
        name=f"{heads.name}, {kind}",
        sizes={"tokens": tokens, "heads": heads.heads, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim},
        dtype={torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype],
        work=Work((7 if training else 2) * 2 * pairs * heads.head_dim, (4 if training else 1) * moved, (dtype,)),
        contestants=[ours, *peers],
        yardstick="SDPA",
        margins=(1.5, 3.0),
        training=training,
    )


def chat_contest(
    heads: Heads, sequences: int, dtype: torch.dtype, device: torch.device, seed: int, *, added: str = ""
) -> Contest:
    """Make a step of decoding without pages: a query of each sequence and head, all its keys; beside it SDPA.

    Args:
        heads: sizes; `tokens` are the keys of each sequence.
        sequences: of the step.
        dtype: of queries, keys and values.
        device: where it runs.
        seed: of the numbers.
        added: to the scores: nothing, or `ALiBi`.
    """
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (
        torch.empty(sequences, count, tokens, heads.head_dim, dtype=dtype, device=device).normal_(generator=generator)
        for count, tokens in ((heads.heads, 1), (heads.kv_heads, heads.tokens), (heads.kv_heads, heads.tokens))
    )
    given, whole = added_to(heads, added, dtype, device)
    bias = whole[:, -1:] if given else None  # of the last token
    plan, group = causal().plan(1, heads.tokens, device=device), heads.heads // heads.kv_heads
    seen = torch.ones(1, heads.tokens, dtype=torch.bool, device=device)
    few = (q[:, :group].double(), k[:, :1].double(), v[:, :1].double())
    exact = [_attend(*few, seen, 0.0 if bias is None else bias[:group].double())]
    mask = None if bias is None else bias.to(dtype)[None]

    def contestant(name: str, role: Role, run: Attention) -> Contestant:
        return Contestant(name, role, dtype, [partial(run, q, k, v)], lambda: [run(q, k, v)[:, :group]], exact)

    pairs = sequences * heads.heads * heads.tokens
    return Contest(
        group="chat",
        name=f"{heads.name}, {sequences} x {heads.tokens} keys{added and ', '}{added}",
        sizes={"tokens": sequences, "keys": heads.tokens, "heads": heads.heads, "kv_heads": heads.kv_heads},
        dtype={torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype],
        work=Work(4 * pairs * heads.head_dim, k.nbytes + v.nbytes, (dtype,)),
        contestants=[
            contestant("kpt", "kpt", lambda q, k, v: attention(q, k, v, plan, **given)),
            contestant("SDPA", "peer", partial(scaled_dot_product_attention, attn_mask=mask, enable_gqa=True)),
        ],
        yardstick="SDPA",
        margins=(1.5, 3.0),
        graph=True,
    )


def decode_contest(
    heads: Heads, sequences: int, page: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Contest:
    """Make a step of decoding over pages; beside it SDPA on as many keys that lie one after the other, the ideal.

    Args:
        heads: sizes; `tokens` is the length of the longest sequence, of which the shortest has half.
        sequences: of the step.
        page: tokens of a page.
        dtype: of queries, keys and values.
        device: where it runs.
        seed: of the numbers.
    """
    generator = torch.Generator(device).manual_seed(seed)
    lengths = torch.linspace(heads.tokens // 2, heads.tokens, sequences).long().tolist()
    pages = sum(-(-length // page) for length in lengths)
    cache = PagedCache(
        layers=1, pages=pages, page_size=page, kv_heads=heads.kv_heads, head_dim=heads.head_dim, dtype=dtype,
        device=device,
    )  # fmt: skip
    k, v = (
        torch.empty(sequences, heads.kv_heads, heads.tokens, heads.head_dim, dtype=dtype, device=device).normal_(
            generator=generator
        )
        for _ in range(2)
    )
    q = torch.empty(sequences, heads.heads, heads.head_dim, dtype=dtype, device=device).normal_(generator=generator)
    rows = [torch.cat([each[n, :, :length].transpose(0, 1) for n, length in enumerate(lengths)]) for each in (k, v)]
    with cache.step({cache.add(): length for length in lengths}) as step:
        step.update(0, *rows)
    seen = torch.arange(heads.tokens, device=device) < torch.tensor(lengths, device=device)[:, None]
    hidden = seen[:, None, None]

    def contestant(name: str, role: Role, run: Callable[[], Tensor]) -> Contestant:
        return Contestant(name, role, dtype, [run], lambda: [run()[:, : heads.heads // heads.kv_heads]], exact)

    few = heads.heads // heads.kv_heads
    exact = [_attend(q[:, :few, None].double(), k[:, :1].double(), v[:, :1].double(), hidden)[:, :, 0]]
    return Contest(
        group="pages",
        name=f"{heads.name}, {sequences} sequences, pages of {page}",
        sizes={"tokens": sequences, "keys": sum(lengths), "heads": heads.heads, "kv_heads": heads.kv_heads},
        dtype={torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype],
        work=Work(
            4 * sum(lengths) * heads.heads * heads.head_dim,
            2 * sum(lengths) * heads.kv_heads * heads.head_dim * k.element_size(),
            (dtype,),
        ),
        contestants=[
            contestant("kpt", "kpt", lambda: paged(q, cache.k[0], cache.v[0], step.block_table, step.lengths)[0]),
            contestant(
                "SDPA, no pages",
                "peer",
                lambda: scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=hidden, enable_gqa=True)[:, :, 0],
            ),
        ],
        yardstick="SDPA, no pages",
        margins=(1.5, 3.0),
        graph=True,
    )


def _step(attend: Attention, leaves: Sequence[Tensor], pull: Tensor | None) -> list[Tensor]:
    """Return the output, and the gradients where there is one to pull back."""
    out = attend(*leaves)
    return [out] if pull is None else [out.detach(), *torch.autograd.grad(out, leaves, pull)]


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, added: Tensor | float = 0.0) -> Tensor:
    scores: Tensor = (q @ k.mT * q.shape[-1] ** -0.5 + added).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ v


def _exact(tensors: Sequence[Tensor], seen: Tensor, pull: Tensor | None, added: Tensor) -> list[Tensor]:
    """Return in float64 what `_step` gives for one head of keys."""
    leaves = [tensor.double().requires_grad_(pull is not None) for tensor in tensors]
    return _step(lambda q, k, v: _attend(q, k, v, seen, added), leaves, None if pull is None else pull.double())


def _sdpa(kind: str, dense: Tensor) -> Attention:
    how: dict[str, Any] = {"is_causal": kind == "causal"}
    if kind not in ("causal", "full"):
        how = {"attn_mask": dense}
    return partial(scaled_dot_product_attention, enable_gqa=True, **how)


def _by_cudnn(attend: Attention) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend(q, k, v)

    return run


def _flex(dense: Tensor, compiler: str, given: dict[str, Tensor]) -> Attention:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return dense[query, key]

    def scored(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if "bias" in given:
            return score + given["bias"][0, h, query, key]
        return score - given["alibi_slopes"][h] * (key - query).abs()

    queries, keys = dense.shape
    blocks = create_block_mask(seen, None, None, queries, keys, device=str(dense.device))
    compiled: Any = torch.compile(flex_attention, dynamic=False, backend=compiler)
    return partial(compiled, score_mod=scored if given else None, block_mask=blocks, enable_gqa=True)
