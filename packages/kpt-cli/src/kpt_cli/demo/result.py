"""Everything that a run of the demo found out, and its form as JSON."""

import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .comparison import Comparison
from .generation import Sample
from .kernels import KernelUse
from .output import KIND
from .quality import QualityComparison
from .training import TrainingLog

if TYPE_CHECKING:
    from kpt_optimize import Plan

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run of the demo.

    Attributes:
        settings: what the user and the size decided.
        machine: what it ran on.
        corpus: what was read.
        model: what was trained.
        training: how that went.
        quality: both models on held-out text.
        comparisons: speed and memory.
        over_plain: speed of the optimised model beside itself without the kernels of a vendor's backend.
        libraries: bytes of every peak that are there before a model is.
        plan: of the optimisation.
        kernels: which kernel ran where.
        samples: what both models write.
        durations: seconds of each phase.
    """

    settings: dict[str, Any]
    machine: dict[str, Any]
    corpus: dict[str, Any]
    model: dict[str, Any]
    training: TrainingLog
    quality: QualityComparison
    comparisons: tuple[Comparison, ...]
    over_plain: tuple[Comparison, ...]
    libraries: int
    plan: "Plan"
    kernels: tuple[KernelUse, ...]
    samples: tuple[Sample, ...]
    durations: dict[str, float]

    @property
    def beyond_budget(self) -> bool:
        """Whether the models differ by more on held-out text than the plan's budget, which holds for its example."""
        return self.quality.difference.relative > self.plan.max_error

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": KIND,
            "format": FORMAT,
            "settings": self.settings,
            "machine": self.machine,
            "corpus": self.corpus,
            "model": self.model,
            "training": asdict(self.training),
            "quality": asdict(self.quality),
            "comparisons": [comparison.as_dict() for comparison in self.comparisons],
            "over_plain": [comparison.as_dict() for comparison in self.over_plain],
            "memory": {"measured_as": MEMORY_MEASURE, "libraries_bytes": self.libraries},
            "plan": self.plan.as_dict(),
            "kernels": [use.as_dict() for use in self.kernels],
            "samples": [sample.as_dict() for sample in self.samples],
            "durations": self.durations,
        }


MEMORY_MEASURE = "peak resident memory of a fresh process while the phase runs, the model being loaded already"


def this_machine() -> dict[str, Any]:
    """What the demo runs on, as far as it decides the figures."""
    import torch
    import transformers

    from kpt_cli.devices import present

    cpu = present().devices[0]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "cpu",
        "cpu": cpu.name,
        "instruction_sets": list(cpu.features),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": cpu.memory_bytes,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
