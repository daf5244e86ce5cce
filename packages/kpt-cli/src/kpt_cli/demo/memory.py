"""Peak memory before and after: each phase of each model in fresh processes, which share nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from .comparison import Comparison, of_bytes
from .sizes import Size

PHASES = ("prefill", "decode")
#: Processes at a time: memory, unlike speed, does not suffer from company.
AT_A_TIME = 2

#: Called with (processes done, processes in all).
OnProcess = Callable[[int, int], None]


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
        RuntimeError: a process failed; its message is shown.
    """
    jobs = [(phase, given) for _ in range(size.memory_runs) for phase in PHASES for given in (None, plan)]
    peaks: dict[tuple[str, Path | None], list[int]] = {job: [] for job in jobs}
    libraries: list[int] = []
    on_process(0, len(jobs))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        results = pool.map(lambda job: _probe(model, job[0], job[1], size), jobs)
        for done, (job, result) in enumerate(zip(jobs, results, strict=True)):
            peaks[job].append(result["peak"])
            libraries.append(result["libraries"])
            on_process(done + 1, len(jobs))
    comparisons = tuple(of_bytes(f"peak memory, {phase}", peaks[phase, None], peaks[phase, plan]) for phase in PHASES)
    return Memory(comparisons, sorted(libraries)[len(libraries) // 2])


def _probe(model: Path, phase: str, plan: Path | None, size: Size) -> dict[str, int]:
    command = [sys.executable, "-m", "kpt_cli.demo.memory_probe", str(model), phase]
    command += ["--prompt-tokens", str(size.prompt_tokens), "--new-tokens", str(size.new_tokens)]
    command += ["--threads", str(torch.get_num_threads())]
    if plan is not None:
        command += ["--plan", str(plan)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    if done.returncode:
        raise RuntimeError(f"the memory probe failed with exit code {done.returncode}:\n{done.stderr}")
    result: dict[str, int] = json.loads(done.stdout)
    return result
