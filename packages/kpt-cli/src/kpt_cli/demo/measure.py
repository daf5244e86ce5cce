"""What is measured of the model before and after: speed, memory, quality, kernels, texts.

The word for a difference is never `faster` for what may be noise.
"""

import gc
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn

import kpt_core
import kpt_optimize
from kpt_cli.bench.machine import memory_growth, plain_pytorch
from kpt_optimize.measure import describe_gain

from .model import WINDOWS, load_model, next_token_loss, quiet_transformers
from .settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NOISE = "within noise"
#: That an interval of a median holds the true one. High, because several are looked at in one report.
CONFIDENCE = 0.99
MOST = 3  #: how often the rounds of timing are run at most
PHASES = ("prefill", "decode", "training")
TRAINING = "memory of a training step"  #: what a training step adds, with transformers' own experts and with KPT's
MEMORY_MEASURE = "peak resident memory of a fresh process while the phase runs, the model being loaded already"
SHORT_PROMPT = 16  #: tokens of the prompt where the memory of decoding is measured
#: Beginnings that the corpus is full of. None ends in a space: a word's token has its space in front.
PROMPTS = ("import os\nimport sys\n\ndef", "class", "    if not isinstance(", "    for")
#: How much less likely a token is that was used already: without it so small a model soon goes round in circles.
REPETITION_PENALTY = 1.1

Figures = dict[str, Any]  #: a part of the report's JSON
OnProgress = Callable[[float, float], None]  #: called with how much is done and how much there is


def _figure(value: float, values: Sequence[float]) -> dict[str, float]:
    low, high = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.25, 0.75]).double()).tolist()
    return {"value": value, "low": low, "high": high, "runs": len(values)}


def _comparison(name: str, unit: str, before: Figures, after: Figures, gain: float, low: float, high: float) -> Figures:
    """Return a figure before and after, with `gain`, how many times better it is, and what that may be by chance."""
    verdict = describe_gain(gain, 0.0, "smaller" if unit == "MiB" else "faster")  # chance is in the interval
    return {
        "name": name,
        "unit": unit,
        "before": before,
        "after": after,
        "gain": gain,
        "gain_low": low,
        "gain_high": high,
        "verdict": NOISE if low <= 1 <= high else verdict,
        "interval": f"{gain:.2f}x [{low:.2f} to {high:.2f}]",
        "good": low > 1,
        "bad": high < 1,
    }


def of_times(name: str, tokens: int, before: Sequence[float], after: Sequence[float]) -> Figures:
    """Compare tokens per second, from the seconds of interleaved rounds."""
    # Ratios of neighbouring runs: a machine that slows down meanwhile does not count as a difference.
    ratios = [old / new for old, new in zip(before, after, strict=True)]
    gain, (low, high) = statistics.median(ratios), median_interval(ratios)
    rates = [tokens / seconds for seconds in before]
    usual = statistics.median(rates)
    # That of before times the ratio, so that all that is shown agrees; the median after may be of other rounds.
    new = {"value": usual * gain, "low": usual * low, "high": usual * high, "runs": len(after)}
    return _comparison(name, "tokens/s", _figure(usual, rates), new, gain, low, high)


def of_bytes(name: str, before: Sequence[int], after: Sequence[int]) -> Figures:
    """Compare bytes of several processes; ranges nearer than 1% are noise, and so is a single process each."""
    old, new = ([max(size, 1) / 2**20 for size in sizes] for sizes in (before, after))
    low, high = 0.99 * min(old) / max(new), 1.01 * max(old) / min(new)
    if len(old) == 1:
        low, high = min(low, 1.0), max(high, 1.0)
    first, second = statistics.median(old), statistics.median(new)
    return _comparison(name, "MiB", _figure(first, old), _figure(second, new), first / second, low, high)


def settled(comparison: Figures) -> bool:
    """Tell if a gain is known to a tenth."""
    return bool(comparison["gain_high"] - comparison["gain_low"] <= 0.1 * comparison["gain"])


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return where the true median lies, whatever the distribution; with 1 in it if there are too few values.

    As many values as coin tosses show heads lie below it: that tells which two enclose it with `CONFIDENCE`.
    """
    ordered, count = sorted(values), len(values)
    outside, inner = 2 / 2**count, 0
    while outside <= 1 - CONFIDENCE:
        inner += 1
        outside += 2 * math.comb(count, inner) / 2**count
    if inner == 0:
        return min(1.0, ordered[0]), max(1.0, ordered[-1])
    return ordered[inner - 1], ordered[count - inner]


class _Clock:
    """A streamer of `generate` that notes when each token arrives; the prompt arrives first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        """Note the time; the token is on the host, so its computation is over."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: nothing is left to be done."""


def generate_timed(model: Any, prompt: Tensor, new_tokens: int) -> tuple[float, float]:
    """Generate exactly `new_tokens` greedily; return the seconds to the first token, and from there to the last."""
    clock = _Clock()
    # Token 0 ends a file; min_new_tokens keeps it from ending a measurement.
    model.generate(
        prompt, streamer=clock, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return clock.times[1] - clock.times[0], clock.times[-1] - clock.times[1]


def compare_speed(
    models: Mapping[str, Any],
    pairs: Sequence[tuple[str, str]],
    prompt: Tensor,
    settings: Settings,
    on_round: OnProgress,
) -> list[list[Figures]]:
    """Time models in turn, so that a change of the machine's load meets all; `plain` is timed in plain PyTorch.

    One round more than the size's is run first and not counted. While the gains are not known to a tenth, as many more
    are run, up to `MOST` times. Return prefill and decode for each pair of names: the second beside the first.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    tokens = {"prefill": prompt.numel(), "decode": settings.new_tokens - 1}

    def beside(first: str, second: str) -> list[Figures]:
        old, new = (list(zip(*seconds[name], strict=True)) for name in (first, second))
        return [of_times(phase, tokens[phase], *times) for phase, *times in zip(tokens, old, new, strict=True)]

    last = MOST * settings.rounds
    order = list(models)
    orders = random.Random(0)
    for turn in range(-1, last):
        on_round(turn + 1, last + 1)
        enough = turn > 0 and turn % settings.rounds == 0
        if enough and all(settled(each) for pair in pairs for each in beside(*pair)):
            break
        # In another order every time, since what runs before leaves its mark on caches and threads.
        orders.shuffle(order)
        for name in order:
            with plain_pytorch() if name == "plain" else nullcontext():
                taken = generate_timed(models[name], prompt, settings.new_tokens)
            if turn >= 0:
                seconds[name].append(taken)
    return [beside(*pair) for pair in pairs]


def compare_memory(model: Path, plan: Path, settings: Settings, on_process: OnProgress) -> tuple[list[Figures], int]:
    """Measure the peak memory of a saved model with and without a plan, each phase in processes of its own.

    Return the peaks, and the part of each that Python, torch and transformers take before a model is loaded.
    """
    context = multiprocessing.get_context("forkserver")
    # The server imports the libraries once, without using them; every measurement is a fork of it.
    context.set_forkserver_preload(
        [__name__, "transformers.models.qwen3_moe.modeling_qwen3_moe", "kpt_moe.transformers"]
    )
    peaks: dict[tuple[str, bool], list[int]] = {(phase, after): [] for phase in PHASES for after in (False, True)}
    libraries = 0
    jobs = list(peaks) * settings.memory_runs
    for done, (phase, after) in enumerate(jobs):
        on_process(done, len(jobs))
        with ProcessPoolExecutor(1, context) as pool:
            before_loading, most = pool.submit(
                _peak_memory, model, plan if after else None, phase, settings, torch.get_num_threads()
            ).result()
        peaks[phase, after].append(most)
        libraries = max(libraries, before_loading)
    names = {phase: TRAINING if phase == "training" else f"peak memory, {phase}" for phase in PHASES}
    return [of_bytes(names[phase], peaks[phase, False], peaks[phase, True]) for phase in PHASES], libraries


def _peak_memory(folder: Path, plan: Path | None, phase: str, settings: Settings, threads: int) -> tuple[int, int]:
    """Load a model, apply a plan to it if there is one, and run a phase; return the bytes before all and the peak."""
    torch.set_num_threads(threads)
    quiet_transformers()
    process = psutil.Process()
    libraries = process.memory_info().rss
    model = load_model(folder)
    generator = torch.Generator().manual_seed(0)
    if phase == "training":
        if plan is not None:
            model.set_experts_implementation("kpt")
        rows = torch.randint(1, settings.vocabulary, (settings.batch, settings.context), generator=generator)
        model.train()

        def step(ids: Tensor) -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        step(rows[:1, :8])  # what libraries keep after their first use is not the step's
        model.zero_grad()
        return libraries, memory_growth(lambda: step(rows))
    if plan is not None:
        model = kpt_optimize.apply_plan(model, plan, inplace=True).model
    tokens, new_tokens = (settings.prompt_tokens, 2) if phase == "prefill" else (SHORT_PROMPT, settings.new_tokens)
    prompt = torch.randint(1, settings.vocabulary, (1, tokens), generator=generator)
    gc.collect()
    before = process.memory_info().rss
    return libraries, before + memory_growth(lambda: generate_timed(model, prompt, new_tokens))


@torch.no_grad()
def compare_quality(before: Any, after: Any, rows: Tensor, bytes_per_token: float, on_batch: OnProgress) -> Figures:
    """Read held-out text, windows `[windows, context]` of token ids, with two models.

    Return figures of both, how far logits differ, and the share of router decisions for each layer and expert.
    """
    counts = torch.zeros(before.config.num_hidden_layers, before.config.num_experts, dtype=torch.int64)
    old_loss = new_loss = largest = scale = 0.0
    same = done = 0
    for batch in rows.split(WINDOWS):
        output = before(input_ids=batch, output_router_logits=True, use_cache=False)
        old, new = output.logits.float(), after(input_ids=batch, use_cache=False).logits.float()
        old_loss += next_token_loss(old, batch).item() * len(batch) / len(rows)
        new_loss += next_token_loss(new, batch).item() * len(batch) / len(rows)
        largest = max(largest, (new - old).abs().max().item())
        scale = max(scale, old.abs().max().item())
        same += int((old.argmax(-1) == new.argmax(-1)).sum())
        for layer, logits in enumerate(output.router_logits):
            chosen = logits.topk(before.config.num_experts_per_tok, dim=-1).indices.flatten()
            counts[layer] += torch.bincount(chosen, minlength=counts.shape[1])
        done += len(batch)
        on_batch(done, len(rows))
    before_and_after = (
        {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2) / bytes_per_token}
        for loss in (old_loss, new_loss)
    )
    return {
        **dict(zip(("before", "after"), before_and_after, strict=True)),
        "tokens": rows.numel() - len(rows),
        "difference": {"largest": largest, "relative": largest / scale, "same_choice": same / rows.numel()},
        "expert_load": (counts / counts.sum(1, keepdim=True)).tolist(),
    }


@torch.no_grad()
def kernels_used(model: nn.Module, tokens: Tensor) -> list[Figures]:
    """Let a model read `[batch, tokens]` once; return a row for all modules that called an op alike, by first call.

    The `level` of an op is 0 if a module called it, 1 if that call's kernel did, and so on.
    """
    calls: list[tuple[str, kpt_core.Selection]] = []
    handles = []
    with kpt_core.record() as log:
        for path, module in model.named_modules():

            def note(_: nn.Module, __: Any, ___: Any, path: str = path) -> None:
                # Modules end from the inside out, so what is new in the log was called by the first that ends.
                calls.extend((path, selection) for selection in log[len(calls) :])

            # An activation without parameters is part of the module that it serves.
            if path and next(module.parameters(), None) is not None:
                handles.append(module.register_forward_hook(note))
        model(input_ids=tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    # That a kernel for another kind of device does not run here explains nothing.
    here = tokens.device.type
    elsewhere = {name for name, backend in kpt_core.backends().items() if here not in backend.device_types}
    rows: dict[tuple[str, int, str, str], Figures] = {}
    for path, selection in calls:
        for level, inner in _flat(selection):
            first = "no installed backend offers a kernel here" if inner.kernel == "reference" else "the first choice"
            why = "; ".join(str(each) for each in inner.refusals if each.backend not in elsewhere) or first
            row = {"modules": [], "op": inner.op, "level": level, "kernel": inner.kernel, "why": why}
            modules = rows.setdefault((inner.op, level, inner.kernel, why), row)["modules"]
            modules += [path] if path not in modules else []
    return list(rows.values())


def _flat(selection: kpt_core.Selection, level: int = 0) -> Iterator[tuple[int, kpt_core.Selection]]:
    yield level, selection
    for child in selection.children:
        yield from _flat(child, level + 1)


def samples(before: Any, after: Any, tokenizer: "PreTrainedTokenizerFast", new_tokens: int) -> list[Figures]:
    """Let both models continue every prompt, always with the likeliest token, so that no chance is involved."""
    chosen = {"max_new_tokens": new_tokens, "do_sample": False, "repetition_penalty": REPETITION_PENALTY}

    def written(model: Any, prompt: str) -> str:
        ids: Any = tokenizer(prompt, return_tensors="pt")["input_ids"]
        added = model.generate(ids, **chosen, pad_token_id=tokenizer.eos_token_id)[0, ids.shape[1] :]
        return str(tokenizer.decode(added, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    pairs = ((prompt, written(before, prompt), written(after, prompt)) for prompt in PROMPTS)
    return [{"prompt": prompt, "before": old, "after": new, "identical": old == new} for prompt, old, new in pairs]
