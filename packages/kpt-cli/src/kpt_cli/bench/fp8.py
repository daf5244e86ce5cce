"""The benchmark of 8-bit weights: `fp8.linear` beside torch's linear layers and `torch._scaled_mm`."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_fp8 import dequantize, linear, quantize
from kpt_optimize.cases import Case, case_tables

from .contest import OURS, Contest, require_accuracy

LINEAR, GEMV, SCALED_MM = "linear", "without oneDNN", "_scaled_mm"
TABLE = "fp8.linear"
QUICK, LARGE = "qwen3-30b-a3b", "llama-3.1-8b"  #: of the op's cases; their weights have a scale for each row here
ROWS = (1, 8, 512)
_FROM_MEMORY = 2**26  #: bytes of 8-bit weights that a call of few rows goes round, so that no cache holds them


def contests(dtypes: Sequence[torch.dtype], seed: int, *, quick: bool) -> Iterator[Contest]:
    """Yield the lines: weights of models, with 1, 8 and 512 rows of activations."""
    cases = {case.name: case for case in case_tables()[TABLE].cases}
    for name, rows, dtype in itertools.product((QUICK,) if quick else (QUICK, LARGE), ROWS, dtypes):
        sizes = {**cases[name].sizes, "rows": rows, "granularity": "row"}
        yield _contest(replace(cases[name], sizes=sizes), dtype, seed)


def _contest(case: Case, dtype: torch.dtype, seed: int) -> Contest:
    arguments = case_tables()[TABLE].arguments(case, dtype=dtype, seed=seed)
    x, codes, scale = (arguments[name] for name in ("x", "weight", "scale"))
    wide = dequantize(codes, scale, granularity="row", dtype=dtype)
    copies = min(16, -(-_FROM_MEMORY // codes.nbytes)) if len(x) < 64 else 1
    ours = _in_turn([partial(linear, x, codes.clone(), scale) for _ in range(copies)])
    theirs = [partial(F.linear, x, wide.clone()) for _ in range(copies)]
    runs = {OURS: ours, LINEAR: _in_turn(theirs), GEMV: _without_onednn(_in_turn(theirs))}
    if (scaled := _scaled_mm(x, codes, scale)) is not None:
        runs[SCALED_MM] = scaled
    title = f"{len(x)} x {codes.shape[1]} x {codes.shape[0]}"
    return Contest(title, dtype, runs, partial(_check, title, x, codes, scale, wide))


def _in_turn(calls: Sequence[Callable[[], Tensor]]) -> Callable[[], Tensor]:
    turns = itertools.cycle(calls)

    def call() -> Tensor:
        with torch.inference_mode():
            return next(turns)()

    return call


def _without_onednn(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a call that torch's own products serve."""

    def run() -> Tensor:
        settings: Any = torch.backends.mkldnn  # its `flags` sets TF32 too, and warns where there is no Intel GPU
        before, settings.enabled = settings.enabled, False
        try:
            return call()
        finally:
            settings.enabled = before

    return run


def _scaled_mm(x: Tensor, codes: Tensor, scale: Tensor) -> Callable[[], Tensor] | None:
    """Return torch's product of 8-bit operands, whose activations are quantised beforehand; None if it does not run."""
    activations, own = quantize(x, granularity="row")
    call = partial(
        torch._scaled_mm,
        activations,
        codes.t(),
        scale_a=own[:, None].float(),
        scale_b=scale[None].float(),
        out_dtype=x.dtype,
    )
    try:
        call()
    except (RuntimeError, NotImplementedError, ValueError):
        return None
    return call


def _check(title: str, x: Tensor, codes: Tensor, scale: Tensor, wide: Tensor) -> None:
    """Raise `GateError` unless KPT is as near to the float64 product of its weights as torch is to that of its own."""
    rows = x[:64]
    exact = rows.double() @ dequantize(codes, scale, granularity="row", dtype=torch.float64).t()
    with torch.inference_mode():
        mine, theirs = linear(rows, codes, scale), F.linear(rows, wide)
    error = theirs.double() - rows.double() @ wide.double().t()
    what = f"fp8.linear, {title} in {x.dtype}: KPT's error"
    require_accuracy(what, "torch's linear", (mine, exact + error, exact), 1.5, 3, torch.finfo(torch.float32).eps)
