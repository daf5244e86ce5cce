"""How large the demo is, and how a folder of an earlier one is recognised."""

from dataclasses import dataclass

REPORT = "report.json"
KIND = "kpt demo"  #: what report.json says it is, by which an earlier demo is recognised


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user decides, and what the size of the demo does; as it stands, a minute of training on two cores."""

    seed: int = 0  # of weights and training windows
    seconds: float | None = None  # of training; `steps` decide if it is None
    steps: int = 400  # of training
    level: str = "balanced"  # of the optimisation
    objective: str = "latency"  # of the optimisation
    max_error: float | None = None  # of the optimisation; None for the level's own
    name: str = "full"  # of the size
    corpus_bytes: int | None = None  # source code to read, None for all of it
    vocabulary: int = 2048  # entries of the tokenizer
    hidden_size: int = 256
    layers: int = 2  # each with experts
    heads: int = 4  # of attention
    key_value_heads: int = 2  # of attention, shared by the heads
    experts: int = 8  # of every layer
    experts_per_token: int = 2
    expert_size: int = 256  # inner size of an expert
    context: int = 128  # tokens of a training window
    batch: int = 8  # windows of a training step
    peak_learning_rate: float = 3e-3  # at the end of the warm-up
    evaluations: int = 10  # how often the held-out loss is measured during training
    held_out_windows: int = 32  # that this takes
    quality_windows: int = 192  # that perplexity and the use of experts are measured on at the end
    prompt_tokens: int = 512  # of the prompt that is timed
    new_tokens: int = 32  # that are generated and timed after it
    rounds: int = 15  # of timing, each with both models; more where the machine is busy
    memory_runs: int = 2  # processes for each phase and model
    sample_tokens: int = 64  # of each text that is shown
    disk_bytes: int = 32 * 2**20  # that the output needs


FULL = Settings()
#: Seconds, to see that everything works.
QUICK = Settings(
    name="quick",
    corpus_bytes=300_000,
    vocabulary=512,
    hidden_size=64,  # FP8 leaves narrower layers alone
    heads=2,
    key_value_heads=1,
    expert_size=64,
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
