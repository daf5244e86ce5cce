"""Tuning on the benchmark's shapes, for the table that the backend ships, and the benchmark's first rows with it."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import kpt_core
from kpt_core.cases import Arguments, Case, CaseTable
from kpt_core.contract import Call, load
from kpt_core.dispatch.autograd import wanted
from kpt_core.dispatch.candidates import Candidate
from kpt_core.dispatch.run import run as run_kernel
from kpt_core.registry import case_tables
from kpt_optimize.tuning import device_name
from kpt_optimize.tuning.files import merge_into
from kpt_optimize.tuning.tables import table_name
from kpt_optimize.tuning.trials import TuningResult, try_case

from . import bench
from .loads import DECODE, HEADLINES, LOADS, TINY_LOADS, Load, problem_of
from .machine import Machine
from .plan import say
from .rows import Job, LeftOutError, Row, Rows

_SECONDS = 4.0
#: Which share of the configurations this process is to compile, `2/5`; the parts of one are compiled at the same time.
_SHARE = "KPT_GPU_SHARE"
#: What is left of the part's time when no further trial is begun, in seconds: the benchmark's rows are to follow.
_KEPT_FOR_BENCH = 100.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tuned: an op on a load, for calls with or without a gradient."""

    op: str
    load: Load
    training: bool

    @property
    def name(self) -> str:
        """Unique among the trials."""
        return f"{self.op}: {self.load.name}{', training' if self.training else ''}"


def run(machine: Machine) -> None:
    """Write a row for each trial, the table, and the rows of the benchmark with that table."""
    share = os.environ.get(_SHARE)
    if share is not None:
        _compile_share(machine, share)
        return
    rows = Rows(machine.plan.folder)
    folder = machine.plan.out / "tuning"
    if not rows.rows:
        shutil.rmtree(folder, ignore_errors=True)
    # Tables of this machine's user would decide what runs untuned.
    os.environ["KPT_TUNING"] = str(folder)
    kpt_core.refresh()
    rows.run(_jobs(machine, folder / table_name(device_name(machine.device))), machine.alive)


def _jobs(machine: Machine, table: Path) -> Iterator[Job]:
    if machine.plan.jobs > 1:
        yield "compiling", partial(_compile, machine)
    for trial in _trials(machine):
        yield trial.name, partial(_tune, machine, trial, table)
    loads = TINY_LOADS[1:2] if machine.plan.tiny else HEADLINES
    for name, find in bench.jobs(machine, loads):
        if name != "dispatch":
            yield f"tuned, {name}", find


def _trials(machine: Machine) -> list[Trial]:
    """What matters most comes first, for the time may end in between."""
    if machine.plan.tiny:
        return [Trial("moe.grouped_mm", TINY_LOADS[0], False), Trial("moe.experts", TINY_LOADS[0], False)]
    large = [load for load in LOADS if "training" in load.phases and load.dtype is torch.bfloat16]
    found = [Trial("moe.experts", load, training) for load in large for training in (False, True)]
    found += [Trial("moe.experts", load, False) for load in DECODE if load.shape.tokens > 8]
    return found + [Trial(op, load, False) for load in large for op in ("moe.grouped_mm", "moe.grouped_mm_wgrad")]


def _tune(machine: Machine, trial: Trial, table: Path) -> Row:
    if time.time() > machine.plan.deadline - (0 if machine.plan.tiny else _KEPT_FOR_BENCH):
        raise LeftOutError("the time was over")
    with machine.served():
        result = _try_products(machine, trial) if trial.op == "moe.experts" else _try(machine, trial)
    refused = [str(refusal) for refusal in result.left_out if refusal.of_call]
    if result.entry is None:
        return {"status": "failed", "error": "nothing was timed", "refused": refused}
    merge_into(table, device_name(machine.device), [result.entry])
    kpt_core.refresh()
    return {"entry": asdict(result.entry), "refused": refused, "table": str(table)}


def _try(machine: Machine, trial: Trial) -> TuningResult:
    return try_case(
        kpt_core.get_op(trial.op),
        _case_table(machine, trial),
        Case(name=trial.load.name),
        device=machine.device,
        dtype=trial.load.dtype,
        seconds=0.01 if machine.plan.tiny else _SECONDS,
        training=trial.training,
    )


def _try_products(machine: Machine, trial: Trial) -> TuningResult:
    """Tune one product of the experts after the other, each with the tiles that were best for those before it.

    The kernel's own configurations change one product each, so that their winner alone would leave the others as they
    are.
    """
    from kpt_backend_nvidia.moe import configs

    single = configs.experts(_call(machine, trial))
    products: dict[str, list[str]] = {}
    for config in single:
        for product, tile in config.items():
            if tile:
                products.setdefault(product, []).append(tile)
    best = dict.fromkeys(single[0], "")
    result: TuningResult | None = None
    for product, tiles in products.items():
        chosen = tiles[:2] if machine.plan.tiny else tiles
        offered = [{**best, product: tile} for tile in chosen] + ([best] if any(best.values()) else [])
        with mock.patch.object(configs, "experts", lambda call, offered=offered: offered):
            result = _try(machine, trial)
        if result.entry is not None and result.entry.config is not None:
            best = dict(result.entry.config)
    assert result is not None  # there are products
    return result


def _case_table(machine: Machine, trial: Trial) -> CaseTable:
    """The op's own table, with a case that is made on the device: these are large."""
    table = case_tables()[trial.op]
    return replace(table, build=lambda generator: _arguments(machine, trial), cases=(Case(name=trial.load.name),))


def _call(machine: Machine, trial: Trial) -> Call:
    """A trial's call, whose arguments want a gradient if it is a training step's."""
    op = kpt_core.get_op(trial.op)
    call = op.bind(**_arguments(machine, trial))
    for name in case_tables()[trial.op].gradients if trial.training else ():
        if getattr(call, name) is not None:
            getattr(call, name).requires_grad_()
    return call._replace(needs=wanted(op, call) if trial.training else ())


def _arguments(machine: Machine, trial: Trial) -> Arguments:
    problem = problem_of(trial.load, machine)
    if trial.op == "moe.experts":
        return problem.arguments()
    shape = trial.load.shape
    expert, order = problem.index.flatten().sort(stable=True)
    ids = torch.arange(shape.num_experts, device=machine.device)
    offsets = torch.searchsorted(expert, ids, right=True).int()
    rows = problem.x[order // shape.top_k]
    up = problem.up if trial.load.gpt_oss else problem.up.mT
    if trial.op == "moe.grouped_mm":
        return {"x": rows, "weight": up, "offsets": offsets}
    grad = torch.randn(rows.shape[0], up.shape[2], device=machine.device).to(rows.dtype)
    return {"x": rows, "grad": grad, "offsets": offsets}


def _compile(machine: Machine) -> Row:
    """Compile all configurations at once, in as many processes as there are jobs: Triton keeps what they compile."""
    jobs = machine.plan.jobs
    start = time.time()
    command = [sys.executable, *sys.argv]
    log = machine.plan.folder / "compiling.txt"
    with log.open("ab") as stream:
        workers = [
            subprocess.Popen(command, env=os.environ | {_SHARE: f"{number}/{jobs}"}, stdout=stream, stderr=stream)
            for number in range(jobs)
        ]
        try:
            limit = 0.4 * (machine.plan.deadline - start)
            codes = [worker.wait(max(1.0, start + limit - time.time())) for worker in workers]
        except subprocess.TimeoutExpired:
            raise LeftOutError(
                "not all was compiled in 40% of the time; the rest is compiled as it is measured"
            ) from None
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    if any(codes):
        return {"status": "failed", "error": f"the processes ended with {codes}; see {log.name}"}
    return {"processes": jobs}


def _compile_share(machine: Machine, share: str) -> None:
    """Run every n-th configuration of every trial once."""
    number, of = map(int, share.split("/"))
    for trial in _trials(machine):
        with machine.served(), torch.set_grad_enabled(trial.training):
            op, call = kpt_core.get_op(trial.op), _call(machine, trial)
            taking = [c for c in op.candidates(call.x.device, call.x.dtype).accepted if c.refusal(call) is None]
            configured = [c for c in taking if c.kernel.configs is not None]
            options = [
                (c, call._replace(config=each)) for c in configured for each in load(c.kernel.configs or "")(call)
            ]
            for candidate, own in options[number::of]:
                _run_once(op, candidate, own)
        del call, options


def _run_once(op: kpt_core.Op[..., Any], candidate: Candidate, call: Call) -> None:
    try:
        out = run_kernel(op, candidate, call)
        if call.needs:
            leaves = [getattr(call, name) for name in call.needs]
            torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
    except Exception as error:  # tuning meets it again and says so
        say(f"{op.name} with {call.config}: {type(error).__name__}: {str(error).splitlines()[0]}")
