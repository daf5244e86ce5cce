"""The suite finds every planted fault, alone and ten at a time."""

import gc
import math
import os
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
import torch

import honest
import kpt_core
from kpt_conformance.checks import cost, declarations
from kpt_conformance.checks.catalog import CHECKS
from kpt_conformance.extent import extent_of
from kpt_conformance.interpreter import interpreting
from kpt_conformance.loopback import Loopback
from kpt_conformance.subject import Subject
from kpt_conformance.suite import trials
from kpt_conformance.trial import Trial
from kpt_optimize.cases import CaseTable, case_tables
from mutants import MUTANTS, attention, coming_ops, fp8, models, paged, top_k_gating
from mutants.mutant import Functions, Mutant, Parts, combined
from sample_ops import SAMPLES
from scaled_mm import SCALED_MM

CHECK = {check.__name__: check for check in CHECKS}
SAMPLE_TABLES = (SCALED_MM, coming_ops.TABLE, *(table for _, table in SAMPLES.values()))
TABLES = {**case_tables(), **{table.op: table for table in SAMPLE_TABLES}}
CPU = torch.device("cpu")
#: Kernels without a fault, which pass where a fault was found.
RIGHT: dict[str, tuple[Functions, dict[str, object]]] = {
    "moe.grouped_mm": (
        import_module("mutants.triton_kernels").kernel()() if interpreting() else Parts().functions(),
        {},
    ),
    "moe.experts": ((honest.Experts(),), {"differentiable": True}),
    "sample.quantise_rows": (SAMPLES["sample.quantise_rows"][0], {}),
    "moe.top_k_gating": ((top_k_gating.Gating(),), {"differentiable": True}),
    "attention.dense": (attention.right(), {}),
    **{f"attention.{op}": (paged.right(f"attention.{op}"), {}) for op in ("paged", "update_cache")},
    **{f"fp8.{op}": (fp8.right(f"fp8.{op}"), {}) for op in ("quantize", "dequantize", "scaled_mm", "linear")},
}
#: Faults at a time, and how many such kernels.
TOGETHER, KERNELS = 10, 6


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    with as_it_was():
        yield


@contextmanager
def as_it_was() -> Iterator[None]:
    """Put back what some of the faults change."""
    python, threads, dtype = random.getstate(), torch.get_num_threads(), torch.get_default_dtype()
    environment, errors, precision = dict(os.environ), numpy.geterr(), torch.get_float32_matmul_precision()
    thresholds, depth = gc.get_threshold(), sys.getrecursionlimit()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
    flags = {name: getattr(matmul, name) for name in ("allow_tf32", "allow_fp16_reduced_precision_reduction")}
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    attention_flags = {kind: getattr(cuda, f"{kind}_sdp_enabled")() for kind in kinds}
    open_files = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    told, cost.tell = cost.tell, _found
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        cost.tell = told
        random.setstate(python)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_flush_denormal(False)
        torch.set_grad_enabled(True)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.backends.mkldnn.enabled, torch.backends.cudnn.benchmark = True, False
        torch.backends.cudnn.deterministic, torch.backends.opt_einsum.enabled = False, True
        for name, value in flags.items():
            setattr(matmul, name, value)
        for kind, value in attention_flags.items():
            getattr(cuda, f"enable_{kind}_sdp")(value)
        gc.enable()
        gc.set_threshold(*thresholds)
        sys.setrecursionlimit(depth)
        if cores is not None:
            os.sched_setaffinity(0, cores)
        _close_others(open_files)
        numpy.seterr(**errors)
        os.environ.clear()
        os.environ.update(environment)


def _found(message: str) -> None:
    """Count what a check only tells of as found."""
    raise AssertionError(message)


def _close_others(files: set[str]) -> None:
    """Close what was opened of `/dev/null` since, as a fault leaves it."""
    for file in set(os.listdir("/proc/self/fd")) - files if files else ():
        try:
            left = os.readlink(f"/proc/self/fd/{file}") == os.devnull
        except OSError:
            continue
        if left:
            os.close(int(file))


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    with Loopback("planted", capabilities={"bf16"}) as backend:
        yield backend


def subject_of(loopback: Loopback, op: str, functions: Functions, **offer: object) -> Subject:
    kernel = loopback.offer(op, *functions, **offer)
    return Subject(kpt_core.get_op(op), kernel.forward, loopback.name, CPU, kernel)


def fault_in(trial: Trial, check: str) -> str | None:
    """What a check says of a trial; None if it passes or is skipped."""
    try:
        with as_it_was():
            CHECK[check](trial)
    except pytest.skip.Exception:
        return None
    except Exception as error:
        return f"{trial.case.name}: {type(error).__name__}: {error}"
    return None


def _work(trial: Trial) -> int:
    """Return about what a trial costs: a fault is found in the cheapest that shows it."""
    sizes = [size for size in trial.case.sizes.values() if type(size) is int]
    return math.prod(max(size, 1) for size in sizes)


def faults_in(subject: Subject, table: CaseTable, mutant: Mutant) -> Iterator[tuple[Trial, str]]:
    """What the mutant's check finds, the likeliest trials first."""
    every = trials(subject, table, extent_of(CHECK[mutant.found_by]))
    for trial in sorted(every, key=lambda trial: (not mutant.at(trial), trial.case.model, _work(trial))):
        fault = fault_in(trial, mutant.found_by)
        if fault is not None:
            yield trial, fault


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.op}: {mutant.name}")
def test_fault_is_found(loopback: Loopback, mutant: Mutant) -> None:
    subject, table = subject_of(loopback, mutant.op, mutant.make(), **mutant.offer), TABLES[mutant.op]
    if mutant.found_by in CHECK:
        trial, fault = next(faults_in(subject, table, mutant), (None, ""))
        assert trial is not None, f"{mutant.found_by} does not find the fault"
        if (mutant.op in RIGHT or mutant in models.MUTANTS) and "traceable" not in mutant.offer:
            functions, offer = models.right(mutant.op) if mutant in models.MUTANTS else RIGHT[mutant.op]
            right = subject_of(loopback, mutant.op, functions, **offer)
            assert fault_in(replace(trial, subject=right), mutant.found_by) is None, f"no fault of this one: {fault}"
    else:
        with pytest.raises((AssertionError, kpt_core.KptError)):
            getattr(declarations, mutant.found_by)(subject, table)


@pytest.mark.skipif(interpreting() or find_spec("triton") is None, reason="Triton is not there")
def test_faults_of_triton_kernels_are_found_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "test_fault_is_found"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(done.stdout.rsplit(" passed", 1)[0].split()[-1]) >= 8


@pytest.mark.skipif(interpreting(), reason="the interpreter has faults of its own")
def test_faults_are_many_and_for_every_check() -> None:
    names = Counter((mutant.op, mutant.name) for mutant in MUTANTS)
    assert len(names) == len(MUTANTS) >= 70
    # Faults of ops rather than of kernels are in test_checks; the rest asks for a GPU.
    of_ops = {"custom_ops", "compiled", "compiled_sizes", "inductor", "exported", "derivatives", "meta_result"}
    on_gpus = {name for name, check in CHECK.items() if check.__module__.endswith(".accelerators")}
    left = set(CHECK) - {mutant.found_by for mutant in MUTANTS}
    assert left == of_ops | on_gpus | {"vmapped", "autocast"}


#: What shows in long sums alone takes seconds.
SLOW = {"the result is rounded twice", "partial sums of K are kept in the dtype"}
#: Those that can stand beside others.
COMBINED = [m for m in MUTANTS if (m.change or m.wrap) and not m.offer and m.found_by in CHECK and m.name not in SLOW]


@cache
def shown_by(mutant: Mutant) -> Trial:
    """The first trial that shows a fault which is alone, whatever was called before."""
    with Loopback("alone", capabilities={"bf16"}) as loopback:
        for trial, _ in faults_in(subject_of(loopback, mutant.op, mutant.make()), TABLES[mutant.op], mutant):
            fresh = replace(trial, subject=subject_of(loopback, mutant.op, mutant.make()))
            if fault_in(fresh, mutant.found_by) is not None:
                return trial
    raise AssertionError(f"{mutant.found_by} does not find {mutant.name!r}")


@pytest.mark.skipif(interpreting(), reason="of plain PyTorch")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, KERNELS))])
def test_no_fault_hides_behind_nine_others(loopback: Loopback, seed: int) -> None:
    planted = random.Random(seed).sample(COMBINED, TOGETHER)
    left, found = list(planted), True
    while left and found:
        found = False
        for mutant in list(left):
            seen = shown_by(mutant)
            kernel = subject_of(loopback, mutant.op, combined(left))
            trial = Trial(kernel, seen.table, seen.case, seen.dtype)
            if fault_in(trial, mutant.found_by) is not None:
                left.remove(mutant)  # mended; the others stay
                found = True
    assert not left, f"never found beside the others: {[mutant.name for mutant in left]}"
    subject = subject_of(loopback, "moe.grouped_mm", combined(left))
    assert not any(
        fault_in(Trial(subject, t.table, t.case, t.dtype), m.found_by) for m in planted for t in [shown_by(m)]
    )
