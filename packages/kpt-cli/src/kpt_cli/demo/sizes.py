"""How large the demo is: the model, its training, and what is measured."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Everything about the demo that its user does not choose.

    Attributes:
        name: `full` or `quick`.
        corpus_bytes: source code to read, None for all of it.
        vocabulary: entries of the tokenizer.
        hidden_size: of the model.
        layers: of the model, each with experts.
        heads: of attention.
        key_value_heads: of attention, shared by the heads.
        experts: of every layer.
        experts_per_token: that run for a token.
        expert_size: inner size of an expert.
        context: tokens of a training window.
        batch: windows of a training step.
        steps: of training.
        peak_learning_rate: at the end of the warm-up.
        evaluations: how often the held-out loss is measured during training.
        held_out_windows: that this takes.
        quality_windows: that perplexity and the use of experts are measured on at the end.
        prompt_tokens: of the prompt that is timed.
        new_tokens: that are generated and timed after it.
        rounds: of timing, each with both models; more where the machine is busy.
        memory_runs: processes for each phase and model.
        sample_tokens: of each text that is shown.
        disk_bytes: that the output needs.
    """

    name: str
    corpus_bytes: int | None
    vocabulary: int
    hidden_size: int
    layers: int
    heads: int
    key_value_heads: int
    experts: int
    experts_per_token: int
    expert_size: int
    context: int
    batch: int
    steps: int
    peak_learning_rate: float
    evaluations: int
    held_out_windows: int
    quality_windows: int
    prompt_tokens: int
    new_tokens: int
    rounds: int
    memory_runs: int
    sample_tokens: int
    disk_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


#: About a minute of training on two cores.
FULL = Size(
    name="full",
    corpus_bytes=None,
    vocabulary=2048,
    hidden_size=256,
    layers=2,
    heads=4,
    key_value_heads=2,
    experts=8,
    experts_per_token=2,
    expert_size=256,
    context=128,
    batch=8,
    steps=480,
    peak_learning_rate=3e-3,
    evaluations=10,
    held_out_windows=32,
    quality_windows=192,
    prompt_tokens=512,
    new_tokens=32,
    rounds=15,
    memory_runs=3,
    sample_tokens=64,
    disk_bytes=32 * 2**20,
)

#: Seconds, to see that everything works.
QUICK = Size(
    name="quick",
    corpus_bytes=300_000,
    vocabulary=512,
    hidden_size=32,
    layers=2,
    heads=2,
    key_value_heads=1,
    experts=8,
    experts_per_token=2,
    expert_size=32,
    context=64,
    batch=4,
    steps=12,
    peak_learning_rate=5e-3,
    evaluations=3,
    held_out_windows=8,
    quality_windows=8,
    prompt_tokens=64,
    new_tokens=8,
    rounds=9,
    memory_runs=1,
    sample_tokens=12,
    disk_bytes=8 * 2**20,
)
