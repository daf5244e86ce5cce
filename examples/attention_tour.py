"""A tour of kpt-attention in nine parts. Every figure is measured while you look.

    python examples/attention_tour.py
    python examples/attention_tour.py --part 6

It needs kpt-attention and kpt-optimize, and is faster with kpt-backend-cpu. Where they are installed, part 8 uses
transformers, and part 1 draws a picture with matplotlib.
"""

import argparse
import copy
import logging
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kpt_core
from kpt_attention import (
    Attention,
    FlashAttention3,
    FlexAttention,
    PagedCache,
    Plan,
    attention,
    attention_varlen,
    causal,
    document,
    flex_attention,
    global_tokens,
    merge,
    predicate,
    prefix_lm,
    sliding_window,
    window,
)
from kpt_attention.dense import dense
from kpt_optimize import interleaved_times

CPU = torch.device("cpu")


def tensors(
    tokens: int, heads: int = 4, kv_heads: int | None = None, dim: int = 64, grad: bool = False
) -> list[Tensor]:
    """Return queries, keys and values of one sequence, the same whenever they are made."""
    generator = torch.Generator().manual_seed(0)
    counts = (heads, kv_heads or heads, kv_heads or heads)
    return [torch.randn(1, each, tokens, dim, generator=generator).requires_grad_(grad) for each in counts]


def table(*rows: Sequence[object]) -> None:
    """Print rows of columns."""
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("   " + "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def difference(one: Tensor, other: Tensor) -> str:
    """Return the largest difference."""
    return f"{(one.detach().double() - other.detach().double()).abs().max().item():.1e}"


def masks() -> None:
    """Masks are values: they compose, and show themselves."""
    ids = torch.arange(16) // 6
    shown = {
        "sliding_window(4)": sliding_window(4),
        "causal() & document(ids)": causal() & document(ids),
        "window(2, 2) | global_tokens(1)": window(2, 2) | global_tokens(1),
    }
    pictures = [mask.picture(16).splitlines() for mask in shown.values()]
    for line in zip(*pictures, strict=True):
        print("   " + "    ".join(line))
    print("   " + "    ".join(name.ljust(16) for name in shown) + "\n")
    if find_spec("matplotlib"):
        path = Path(tempfile.gettempdir()) / "attention_mask.png"
        (sliding_window(96) | global_tokens(16)).plot(512).figure.savefig(path)
        print(f"   {path} has a picture of sliding_window(96) | global_tokens(16) over 512 tokens\n")


def any_mask() -> None:
    """Any mask costs what it lets through: beside SDPA with a dense mask, over 2,048 tokens."""
    q, k, v = tensors(2048)
    rows: list[Sequence[object]] = [("mask", "seen", "KPT ms", "SDPA ms", "largest difference")]
    for name, mask in (
        ("sliding_window(128)", sliding_window(128)),
        ("documents of 256", causal() & document(torch.arange(2048) // 256)),
        ("every third key", causal() & predicate(lambda b, h, q, k: (q - k) % 3 == 0)),
    ):
        plan, seen = mask.plan(2048), mask.dense(2048)
        runs = [lambda p=plan: attention(q, k, v, p), lambda s=seen: scaled_dot_product_attention(q, k, v, s)]
        ours, theirs = (min(times) * 1e3 for times in interleaved_times(runs, CPU, rounds=3))
        rows.append(
            (name, f"{seen.float().mean():.0%}", f"{ours:.1f}", f"{theirs:.1f}", difference(*(run() for run in runs)))
        )
    table(*rows)


def training() -> None:
    """The backward exists on every device, and is the same bit for bit when it runs again."""
    q, k, v = tensors(1024, grad=True)
    plan, seen = sliding_window(64).plan(1024), sliding_window(64).dense(1024)

    def ours() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v, plan).square().sum(), (q, k, v))

    def theirs() -> tuple[Tensor, ...]:
        return torch.autograd.grad(scaled_dot_product_attention(q, k, v, seen).square().sum(), (q, k, v))

    times = [min(each) * 1e3 for each in interleaved_times([ours, theirs], CPU, rounds=3)]
    table(
        ("a window of 64, both directions", "ms"),
        ("KPT", f"{times[0]:.1f}"),
        ("SDPA with a dense mask", f"{times[1]:.1f}"),
        ("largest difference of a gradient", max(map(difference, ours(), theirs()))),
        ("the same bits again", all(map(torch.equal, ours(), ours()))),
    )


def scores() -> None:
    """Scores may be capped, sloped, biased, and have a sink; or a function changes them."""
    q, k, v = tensors(256)
    slopes = 2.0 ** -torch.arange(1, 5)
    told = attention(q, k, v, causal(), alibi_slopes=slopes)
    by_function = flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), causal())
    plain, capped = attention(q, k, v, causal()), attention(q, k, v, causal(), softcap=1.0)
    sunk = attention(q, k, v, causal(), sinks=torch.full((4,), 5.0))
    table(
        ("what", "mean size of the output"),
        ("plain", f"{plain.abs().mean():.3f}"),
        ("softcap=1.0", f"{capped.abs().mean():.3f}"),
        ("sinks that take much of the weight", f"{sunk.abs().mean():.3f}"),
        ("alibi_slopes beside the same as a function", f"differ by {difference(told, by_function)}"),
    )


def packing() -> None:
    """Sequences of different lengths lie behind one another: no padding is computed."""
    lengths = torch.tensor([300, 20, 7, 190, 60])
    ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    q, k, v = (each[0].transpose(0, 1) for each in tensors(int(ends[-1])))
    packed = attention_varlen(q, k, v, ends, mask=causal())
    padded = [torch.nn.utils.rnn.pad_sequence(each.split(lengths.tolist()), True).transpose(1, 2) for each in (q, k, v)]

    def ours() -> Tensor:
        return attention_varlen(q, k, v, ends, mask=causal())

    def theirs() -> Tensor:
        return scaled_dot_product_attention(*padded, is_causal=True)

    times = [min(each) * 1e3 for each in interleaved_times([ours, theirs], CPU, rounds=5)]
    whole = theirs().transpose(1, 2)
    same = torch.cat([row[:length] for row, length in zip(whole, lengths.tolist(), strict=True)])
    table(
        ("577 tokens in five sequences", "tokens computed", "ms"),
        ("packed", int(ends[-1]), f"{times[0]:.2f}"),
        ("padded, SDPA", int(lengths.max()) * len(lengths), f"{times[1]:.2f}"),
    )
    print(f"   largest difference: {difference(packed, same)}\n")


def serving() -> None:
    """A paged cache: what prompts begin with is kept once, and sequences fork for nothing."""
    torch.manual_seed(0)
    layer = Attention(256, 8, num_kv_heads=2, causal=True, rotary_base=10000.0)
    embedding = torch.nn.Embedding(100, 256)
    prompt = torch.randint(100, (64,)).tolist()
    rows: list[Sequence[object]] = [("action", "tokens computed", "pages in use", "shared")]
    with torch.no_grad():
        cache = PagedCache(layers=1, pages=40, kv_heads=2, head_dim=32)

        def run(action: str, sequence: int, tokens: list[int]) -> Tensor:
            with cache.step({sequence: tokens}) as step:
                out: Tensor = layer(embedding(torch.tensor(tokens)), step=step)
            rows.append((action, len(tokens), cache.usage().used, cache.usage().shared))
            return out

        first = cache.add(prompt)
        run("a prompt of 64 tokens", first, prompt)
        second = cache.add([*prompt, 1, 2, 3])
        run("another one that begins alike", second, [*prompt, 1, 2, 3][cache.length(second) :])
        third = cache.fork(second)
        run("a fork goes on with another token", third, [5])
        got = run("so does the sequence itself", second, [6])
        table(*rows)
        whole = layer(embedding(torch.tensor([[*prompt, 1, 2, 3, 6]])))
        print(f"   beside the whole sequence at once: largest difference {difference(got[-1], whole[0, -1])}")
        bits = [PagedCache(layers=1, pages=40, kv_heads=2, head_dim=32, dtype=each).k.nbytes
                for each in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)]  # fmt: skip
        print(f"   bytes of keys in float32, bfloat16 and 8 bits: {', '.join(f'{each:,}' for each in bits)}\n")


def layers() -> None:
    """Layers: FlashAttention3, which shows its weights when asked, and FlexAttention by pattern."""
    torch.manual_seed(0)
    x = torch.randn(1, 64, 128)
    out, weights = FlashAttention3(128, 8, causal=True)(x, need_weights=True)
    print(f"   weights {list(weights.shape)}, rows that sum to {weights.sum(-1).mean():.4f}; output {list(out.shape)}")
    rows: list[Sequence[object]] = [("pattern", "keys seen")]
    for pattern, settings in (
        ("causal", {}), ("sliding_window", {"size": 8}), ("prefix_lm", {"length": 16}),
        ("dilated", {"size": 8, "step": 4}), ("global_tokens", {"size": 4, "count": 2}),
        ("natten", {"height": 8, "width": 8, "kernel": 3}),
        ("tree", {"parents": (torch.arange(64) - 1) // 2}),
    ):  # fmt: skip
        made = FlexAttention(128, 8, pattern, settings)
        made(x).sum().backward()
        rows.append((pattern, f"{made.pattern.dense(64).float().mean():.0%}"))
    table(*rows)


def models() -> None:
    """Hugging Face models: one name, in generation and in continuous batching."""
    if not find_spec("transformers"):
        print("   transformers is not installed\n")
        return
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from kpt_attention.transformers import enable_continuous_batching

    logging.disable(logging.WARNING)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=200, pad_token_id=0,
    )  # fmt: skip
    made = []
    for name in ("kpt", "eager"):
        torch.manual_seed(0)
        made.append(LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name).eval())
    ours, eager = made
    prompts = [torch.randint(200, (length,)).tolist() for length in (5, 40, 12)]
    told = GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0)
    wanted = [eager.generate(torch.tensor([each]), generation_config=told)[0, len(each) :].tolist() for each in prompts]
    found = [ours.generate(torch.tensor([each]), generation_config=told)[0, len(each) :].tolist() for each in prompts]
    batched = enable_continuous_batching(ours).generate_batch(prompts, generation_config=told)
    served = [batched[f"req_{place}"].generated_tokens for place in range(len(prompts))]
    table(
        ("tokens equal to eager's", ""),
        ("generate", f"{sum(map(list.__eq__, found, wanted))} of {len(prompts)} prompts"),
        ("continuous batching", f"{sum(map(list.__eq__, served, wanted))} of {len(prompts)} prompts"),
    )


def parts() -> None:
    """Partial results merge, and each call says which kernel it takes."""
    q, k, v = tensors(512, heads=8, kv_heads=2)
    plan = prefix_lm(100).plan(512)
    whole, lse = attention(q, k, v, plan, return_lse=True)
    halves = [
        attention(q, k[:, :, first : first + 256], v[:, :, first : first + 256], _from(first), return_lse=True)
        for first in (0, 256)
    ]
    out, total = merge(*halves[0], *halves[1])
    print(f"   two halves of the keys, merged: output differs by {difference(out, whole)}, "
          f"log-sum-exp by {difference(total, lse)}\n")  # fmt: skip
    print("   " + str(kpt_core.explain(dense, q, k, v, **plan.arguments(512, 512))).replace("\n", "\n   ") + "\n")


def _from(first: int) -> Plan:
    """Return the plan of the same mask for keys from `first` on."""
    return predicate(lambda b, h, q, k: (k + first <= q) | (k + first < 100)).plan(512, 256, offset=0)


PARTS = (masks, any_mask, training, scores, packing, serving, layers, models, parts)


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=range(1, len(PARTS) + 1), help="one part alone")
    chosen = parser.parse_args().part
    for number, part in enumerate(PARTS, 1):
        if chosen in (None, number):
            print(f"{number}. {part.__doc__}\n", flush=True)
            part()


if __name__ == "__main__":
    main()
