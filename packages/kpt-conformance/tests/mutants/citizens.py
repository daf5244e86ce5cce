"""Faults of what a call leaves in the process: settings, memory that Python does not see, files, in every mode."""

import ctypes
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .mutant import Functions, Mutant, Parts, of_wrapper

MUTANTS: list[Mutant] = []
#: Whether a call, which of the kernel's calls it is, shows the fault.
When = Callable[[Any, int], bool]
_LIBC: Any = ctypes.CDLL(None)


def always(call: Any, number: int) -> bool:
    return True


def in_inference_mode(call: Any, number: int) -> bool:
    return torch.is_inference_mode_enabled()


def without_grad(call: Any, number: int) -> bool:
    # The forward of a function of autograd runs without gradients too, and its call has needs.
    return not (call.needs or torch.is_grad_enabled() or torch.is_inference_mode_enabled())


def past_256_rows(call: Any, number: int) -> bool:
    return call.x.shape[0] > 256


def every_tenth(call: Any, number: int) -> bool:
    return number % 10 == 0


def fault(
    name: str, found_by: str, action: Callable[[Any], Any], when: When = always, *, in_backward: bool = False
) -> None:
    """Enter a mutant of `moe.grouped_mm` that does something to the process, and computes what is right."""

    def wrap(forward, backward):
        calls: list[None] = []

        def act(call: Any) -> None:
            calls.append(None)
            if when(call, len(calls)):
                action(call)

        def grouped_mm(call):
            act(call)
            return forward(call)

        def grouped_mm_backward(call, saved, grad):
            act(call)
            return backward(call, saved, grad)

        return (forward, grouped_mm_backward) if in_backward else (grouped_mm, backward)

    MUTANTS.append(of_wrapper(name, found_by, wrap))


def keeping() -> Callable[[Any], None]:
    kept: dict[str, Tensor] = {}

    def keep(call: Any) -> None:
        kept["x"] = call.x

    return keep


def leaking(size: int) -> Callable[[Any], None]:
    def leak(call: Any) -> None:
        _LIBC.malloc(size)

    return leak


def pin(call: Any) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def opening(call: Any) -> None:
    os.open(os.devnull, os.O_RDONLY)


if hasattr(os, "sched_setaffinity"):
    fault("it runs on one core from now on", "process_state", pin)
for _flag in ("flash", "mem_efficient", "math", "cudnn"):
    _switch = getattr(torch.backends.cuda, f"enable_{_flag}_sdp")
    fault(f"it switches {_flag} attention off", "process_state", lambda call, switch=_switch: switch(False))
fault(
    "backward allows TF32 of cuBLAS",
    "process_state",
    lambda call: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    in_backward=True,
)
fault(
    "it reduces in half the precision from now on, under inference mode",
    "process_state",
    lambda call: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    in_inference_mode,
)
fault(
    "it makes cuDNN deterministic", "process_state", lambda call: setattr(torch.backends.cudnn, "deterministic", True)
)
fault("it switches opt_einsum off", "process_state", lambda call: setattr(torch.backends.opt_einsum, "enabled", False))
fault("it stops the search for cycles", "process_state", lambda call: gc.disable())
fault(
    "backward makes the search for cycles rare",
    "process_state",
    lambda call: gc.set_threshold(100_000),
    in_backward=True,
)
fault("it lets Python recurse deeper", "process_state", lambda call: sys.setrecursionlimit(5_000), past_256_rows)
fault(
    "it seeds the random numbers under inference mode",
    "process_state",
    lambda c: torch.manual_seed(0),
    in_inference_mode,
)
fault("it seeds Python's random numbers under no_grad", "process_state", lambda c: random.seed(0), without_grad)
fault("it seeds the random numbers past 256 rows", "process_state", lambda c: torch.manual_seed(0), past_256_rows)
fault(
    "it draws a random number past 256 rows under inference mode",
    "process_state",
    lambda call: torch.rand(1),
    lambda call, number: past_256_rows(call, number) and in_inference_mode(call, number),
)
fault("backward seeds past 256 rows", "process_state", lambda c: torch.manual_seed(0), past_256_rows, in_backward=True)
fault("it leaves every file open that it reads", "process_state", opening)
fault("x is kept under no_grad", "keeps_nothing_alive", keeping(), without_grad)
fault("x is kept under inference mode", "keeps_nothing_alive", keeping(), in_inference_mode)
fault("x is kept past 256 rows", "keeps_nothing_alive", keeping(), past_256_rows)
fault("4 KB of malloc are lost a call", "leaks_nothing", leaking(4096))
fault("4 KB of malloc are lost in every tenth call", "leaks_nothing", leaking(4096), every_tenth)
fault("4 KB of malloc are lost under no_grad", "leaks_nothing", leaking(4096), without_grad)
fault("1 KB of malloc is lost a backward", "leaks_nothing", leaking(1024), in_backward=True)
fault("a file stays open in every tenth call", "leaks_nothing", opening, every_tenth)
fault("backward leaves a file open in every tenth call", "leaks_nothing", opening, every_tenth, in_backward=True)


def costly(name: str, action: Callable[[], Any], *, in_backward: bool = False) -> None:
    """Enter a mutant that costs more: alone, since any other fault beside it would take its time."""

    def make() -> Functions:
        forward, backward = Parts().functions()

        def grouped_mm(call):
            action()
            return forward(call)

        def grouped_mm_backward(call, saved, grad):
            action()
            return backward(call, saved, grad)

        return (forward, grouped_mm_backward) if in_backward else (grouped_mm, backward)

    MUTANTS.append(Mutant(name, "moe.grouped_mm", "cost", make))


costly("every call takes 20 ms more", lambda: time.sleep(0.02))
costly("every backward takes 40 ms more", lambda: time.sleep(0.04), in_backward=True)
costly("every call has 64 MB more", lambda: torch.empty(64_000_000, dtype=torch.uint8))
