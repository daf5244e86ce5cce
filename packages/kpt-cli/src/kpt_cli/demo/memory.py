"""Peak memory before and after: each phase of each model in processes of its own, which share nothing."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .comparison import Comparison, of_bytes
from .memory_probe import PHASES
from .sizes import Size

#: Called with (processes done, processes in all).
OnProcess = Callable[[int, int], None]


#: What a training step adds, with transformers' own experts and with KPT's.
TRAINING = "memory of a training step"


@dataclass(frozen=True, slots=True)
class Memory:
    """What the processes said.

    Attributes:
        comparisons: peak of each phase.
        libraries: bytes that Python, torch and transformers take before a model is loaded, part of every peak.
    """

    comparisons: tuple[Comparison, ...]
    libraries: int


def compare_memory(model: Path, plan: Path, size: Size, on_process: OnProcess) -> Memory:
    """Measure a saved model with and without a plan.

    Raises:
        RuntimeError: the probe failed; its message is shown.
    """
    command = [sys.executable, "-m", "kpt_cli.demo.memory_probe", str(model), str(plan)]
    command += ["--runs", str(size.memory_runs), "--threads", str(torch.get_num_threads())]
    command += ["--prompt-tokens", str(size.prompt_tokens), "--new-tokens", str(size.new_tokens)]
    command += ["--batch", str(size.batch), "--context", str(size.context)]
    peaks: dict[tuple[str, bool], list[int]] = {(phase, after): [] for phase in PHASES for after in (False, True)}
    libraries = 0
    total = size.memory_runs * len(peaks)
    with (
        tempfile.TemporaryFile("w+") as messages,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        ) as probe,
    ):
        assert probe.stdout is not None
        for done, line in enumerate(probe.stdout):
            on_process(done, total)
            result = json.loads(line)
            peaks[result["phase"], result["optimised"]].append(result["peak"])
            libraries = max(libraries, result["libraries"])
        if probe.wait():
            messages.seek(0)
            raise RuntimeError(f"the memory probe failed with exit code {probe.returncode}:\n{messages.read()}")
    names = {"training": TRAINING}
    comparisons = (
        of_bytes(names.get(phase, f"peak memory, {phase}"), peaks[phase, False], peaks[phase, True]) for phase in PHASES
    )
    return Memory(tuple(comparisons), libraries)
