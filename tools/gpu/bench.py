"""The benchmark: our experts beside their peers, in one run, on the same tensors, after a gate of correctness."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kpt_core
from kpt_backend_nvidia import BACKEND
from kpt_moe.experts import experts
from kpt_moe.grouped_mm import grouped_mm
from kpt_optimize import gain_of

from .contestants import KPT, PLAIN, Contestant, in_force, makers
from .loads import LOADS, TINY_LOADS, Load, Problem, problem_of
from .machine import Machine, Stage
from .oracle import faults
from .rows import Job, LeftOutError, Row, Rows

#: Seconds of measuring a row.
_SECONDS = 1.5
#: A peer whose output is further than this from ours, relative to its mean, computes something else.
_SAME = 0.05
#: What is wanted on an H200.
_OVER_GROUPED_MM, _SAVED, _BANDWIDTH, _DISPATCH = 1.3, 1.05, 0.75, 1e-6


def run(machine: Machine) -> None:
    """Write the rows of all loads, with the kernels as they are shipped: this machine's own tuning is left out."""
    os.environ["KPT_TUNING"] = str(machine.plan.folder / "no tables")
    kpt_core.refresh()
    Rows(machine.plan.folder).run(jobs(machine, TINY_LOADS if machine.plan.tiny else LOADS), machine.alive)


def jobs(machine: Machine, loads: Sequence[Load]) -> Iterator[Job]:
    """The rows of some loads; those of one phase are of one run."""
    yield "copy bandwidth", lambda: {"bytes_per_second": machine.copy_bandwidth()}
    yield "dispatch", partial(_dispatch, machine)
    for load in loads:
        for phase in load.phases:
            yield f"{load.name}: {phase}", partial(_measure, machine, load, phase)


def _dispatch(machine: Machine) -> Row:
    """What a call through the op costs over a call of the kernel that serves it."""
    x = torch.randn(16, 64, device=machine.device, dtype=machine.dtype(torch.bfloat16))
    weight = torch.randn(2, 64, 64, device=machine.device, dtype=x.dtype)
    offsets = torch.tensor([7, 16], dtype=torch.int32, device=machine.device)
    calls, batches = (5, 3) if machine.plan.tiny else (200, 41)
    with machine.served(), torch.no_grad():
        target = kpt_core.explain("moe.grouped_mm", x, weight, offsets).kernel
        served = [kernel for kernel in BACKEND.kernels() if kernel.forward == target]
        if not served:
            raise AssertionError(f"moe.grouped_mm is served by {target}, which is none of the backend's kernels")
        alone = partial(served[0].load(), grouped_mm.bind(x, weight, offsets))
        functions: tuple[Callable[[], object], ...] = (partial(grouped_mm, x, weight, offsets), alone)
        taken: tuple[list[float], list[float]] = ([], [])
        for _ in range(batches):
            for function, times in zip(functions, taken, strict=True):
                machine.wait()
                start = time.perf_counter()
                for _ in range(calls):
                    function()
                times.append((time.perf_counter() - start) / calls)
                machine.wait()
    through, past = map(statistics.median, taken)
    differences = [a - b for a, b in zip(*taken, strict=True)]
    added = statistics.median(differences)
    wanted = _target("dispatch adds, us", added * 1e6, _DISPATCH * 1e6, most=True)
    return {"kernel": target, "op": through, "kernel_alone": past, "added": added, "targets": [wanted]}


def _measure(machine: Machine, load: Load, phase: str) -> Row:
    """One phase of one load, of all who take part."""
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
    problem = problem_of(load, machine)
    training = phase == "training"
    problem.require_gradients(training)
    with ExitStack() as stack:
        stack.enter_context(machine.served())
        stack.enter_context(torch.set_grad_enabled(training))
        row = _gate(problem, training)
        present, left_out = _present(problem, machine, training)
        contest = {}
        for contestant in present:
            try:
                contest[contestant.name] = _stages(machine, problem, contestant, phase)
            except Exception as error:
                _leave(left_out, contestant.name, error, machine)
        row["captured"] = [name for name, (_, captured) in contest.items() if captured]
        saved = {c.name: _saved(problem, c, left_out) for c in present} if training else {}
        turn = problem.turn if phase == "decode" else lambda turn: None
        timed = machine.interleaved({name: stages for name, (stages, _) in contest.items()}, _SECONDS, turn)
    row |= {"load": load.name, "phase": phase, "left_out": left_out, "results": _results(load, phase, timed, problem)}
    if training:
        row["least_saved"] = problem.least_saved
        for name, size in saved.items():
            if size is not None and name in row["results"]:
                row["results"][name] |= {"saved": size, "saved_over_least": size / problem.least_saved}
    if phase == "decode":
        row |= _bandwidth(machine, problem, row["results"])
    return row | {"targets": list(_targets(load, phase, row))}


def _gate(problem: Problem, training: bool) -> Row:
    """Compare our output, and gradients, with float64.

    Raises:
        AssertionError: it is further off than it may be: there is no figure then.
    """
    found = {}
    with kpt_core.record() as log:
        found[KPT] = _outcome(problem, training)
    with in_force(PLAIN):
        found[PLAIN] = _outcome(problem, training)
    said, ratios = faults(problem, found[KPT], found[PLAIN])
    if said:
        raise AssertionError("no figures: " + "; ".join(said))
    served = next((s.kernel for s in log if s.op == "moe.experts"), "?")
    return {"kernel": served, "error_over_plain": ratios}


def _outcome(problem: Problem, training: bool) -> dict[str, Tensor]:
    out = experts(**problem.arguments())
    if not training:
        return {"result": out}
    leaves = problem.leaves
    gradients = torch.autograd.grad(out, list(leaves.values()), problem.grad)
    return {"result": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def _present(problem: Problem, machine: Machine, training: bool) -> tuple[list[Contestant], dict[str, str]]:
    """Those whose output is right, and why the others are not among them."""
    present: list[Contestant] = []
    left_out: dict[str, str] = {}
    ours: Tensor | None = None
    for name, make in makers(machine).items():
        try:
            contestant = make(problem, machine)
            for leaf in contestant.leaves or ():
                leaf.requires_grad_(training)
            with in_force(name):
                out = contestant.forward().detach()
            ours = out if ours is None else ours
            if contestant.same:
                off = ((out.float() - ours.float()).abs().mean() / ours.float().abs().mean()).item()
                if not off <= _SAME:
                    raise LeftOutError(f"its output is {off:.0%} off ours")
            present.append(contestant)
        except Exception as error:
            _leave(left_out, name, error, machine)
    return present, left_out


def _leave(left_out: dict[str, str], name: str, error: Exception, machine: Machine) -> None:
    """Note why one does not take part; what it broke for all, or what is ours, is raised."""
    if name == KPT or not machine.alive():
        raise error
    text = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
    left_out[name] = text if isinstance(error, LeftOutError) else f"{type(error).__name__}: {text}"


def _stages(machine: Machine, problem: Problem, contestant: Contestant, phase: str) -> tuple[list[Stage], bool]:
    """What is timed, and whether it is the replay of a CUDA graph, as which small calls run where they matter."""
    name, forward = contestant.name, contestant.forward

    def ahead(_: Any) -> Tensor:
        with in_force(name):
            return forward()

    if phase == "training":
        leaves = contestant.leaves or tuple(problem.leaves.values())
        pull = problem.grad if contestant.pull is None else contestant.pull

        def back(out: Tensor) -> object:
            with in_force(name):
                return torch.autograd.grad(out, leaves, pull)

        back(ahead(None))
        return [ahead, back], False
    if phase in ("graph", "decode") and machine.device.type == "cuda" and contestant.capturable:
        try:
            replay = machine.captured(partial(ahead, None))
        except RuntimeError:
            if name == KPT or not machine.alive():
                raise
        else:
            return [lambda _: replay()], True
    return [ahead], False


def _saved(problem: Problem, contestant: Contestant, left_out: dict[str, str]) -> int | None:
    """Bytes of the storages that autograd keeps for backward, parameters left out."""
    if not contestant.same:
        return None
    leaves = contestant.leaves or tuple(problem.leaves.values())
    own = {t.untyped_storage().data_ptr() for t in leaves if t is not problem.x and t is not problem.weights}
    sizes: dict[int, int] = {}
    alive = []  # an address says which storage it is only as long as the storage lives

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), in_force(contestant.name):
            contestant.forward()
    except Exception as error:
        left_out[f"{contestant.name}, saved bytes"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return None
    return sum(sizes.values())


def _results(load: Load, phase: str, timed: dict[str, list[list[float]]], problem: Problem) -> dict[str, Row]:
    """Medians of each, and ours over it; of a training step, of the whole and of its backward."""
    kinds: dict[str, tuple[float, Callable[[list[list[float]]], list[float]]]] = {
        phase: (1.0, lambda stages: stages[0])
    }
    if phase == "training":
        kinds = {
            "forward+backward": (3.0, lambda stages: [sum(each) for each in zip(*stages, strict=True)]),
            "backward": (2.0, lambda stages: stages[1]),
        }
    found: dict[str, Row] = {}
    for name, stages in timed.items():
        found[name] = {}
        for kind, (share, seconds_of) in kinds.items():
            taken, ours = seconds_of(stages), seconds_of(timed[KPT])
            median = statistics.median(taken)
            gain, noise = gain_of(taken, ours)
            found[name][kind] = {
                "seconds": median,
                "tflops": share * load.shape.flops / median / 1e12,
                "tokens_per_second": load.shape.tokens / median,
                "kpt_is_faster": gain,
                "noise": noise,
                "rounds": len(taken),
            }
    return found


def _bandwidth(machine: Machine, problem: Problem, results: dict[str, Row]) -> Row:
    """Bytes a second of the weights of the experts that are touched, and their share of a copy's."""
    copied = machine.copy_bandwidth()
    size = problem.experts_touched * problem.expert_bytes
    for result in results.values():
        achieved = size / result["decode"]["seconds"]
        result["decode"] |= {"bytes_per_second": achieved, "of_copy": achieved / copied}
    return {"copy_bytes_per_second": copied, "experts_touched": problem.experts_touched, "bytes": size}


def _targets(load: Load, phase: str, row: Row) -> Iterator[Row]:
    """What is wanted on an H200, and what is there."""
    results = row["results"]
    ours, peer = results[KPT], results.get("transformers grouped_mm")
    for kind, wanted in load.tflops:
        if kind in ours:
            yield _target(f"{kind}, TFLOP/s", ours[kind]["tflops"], wanted)
            if peer is not None:
                over = peer[kind]["kpt_is_faster"]
                yield _target(f"{kind}, over transformers grouped_mm", over, _OVER_GROUPED_MM)
    if phase in ("forward", "graph") and load.tokens_per_second is not None:
        yield _target(f"{phase}, tokens/s", ours[phase]["tokens_per_second"], load.tokens_per_second)
    if phase == "decode":
        yield _target("of copy bandwidth", ours["decode"]["of_copy"], _BANDWIDTH)
    if "saved_over_least" in ours:
        yield _target("saved for backward, over the least", ours["saved_over_least"], _SAVED, most=True)


def _target(what: str, got: float, wanted: float, *, most: bool = False) -> Row:
    return {"what": what, "got": got, "wanted": wanted, "most": most, "met": got <= wanted if most else got >= wanted}
