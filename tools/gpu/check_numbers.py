"""Each kernel once in bfloat16 against float64, forward and backward: small cases, and a real model's sizes.

That compiles the programs that are timed afterwards, in as many processes as run these checks.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from rows import Row
from setting import Setting, served
from torch import Tensor

from kpt_conformance.subject import Subject
from kpt_conformance.suite import subjects
from kpt_conformance.trial import Trial
from kpt_core.contract import GPU
from kpt_moe.grouped_mm import grouped_mm
from kpt_optimize.cases import Case, CaseTable

#: The cases that are tried, where a table has them, and of each table's real models' two; the first alone if tiny.
_CASES = (
    *("small", "one token", "63 tokens, odd sizes", "63 rows, odd sizes", "gpt-oss options", "8-bit blocks"),
    *("groups with correction bias", "whole sizes", "whole sizes, one scale each"),
    *("causal", "documents", "blocks", "softcap and a bias", "sinks", "window", "decode past many keys, left padding"),
)
_MODELS = ("qwen3", "llama", "granite", "deepseek")
#: Small and of each kind of load: by pointers, by TMA, with warps of their own.
TILES = ("128x128x64 w8 s3 g8", "128x128x64 w8 s3 g8 tma", "128x128x64 w8 s3 g8 tma ws")


@dataclass(frozen=True, slots=True)
class Tried:
    """A kernel on a case; `large_cases` has one large one at a time in memory."""

    subject: Subject
    table: CaseTable
    case: Case
    dtype: torch.dtype


def _kernels(setting: Setting) -> Iterator[tuple[str, Tried]]:
    with served(setting):
        nvidia = subjects("nvidia", str(setting.device))
        torchs = [each for each in subjects("torch", str(setting.device)) if _for_gpus(each[0])]
        for subject, table in (*nvidia, *torchs):
            wanted = setting.dtype(torch.bfloat16)
            dtype = wanted if wanted in subject.dtypes(table) else subject.dtypes(table)[0]
            named = {case.name: case for case in table.cases}
            cases = [named[name] for name in _CASES if name in named]
            models = [case for case in table.cases if case.model and case.name.startswith(_MODELS)]
            chosen = [*cases, *models[:2], *(case for case in models[2:] if case.large)] or list(table.cases[:1])
            if setting.tiny:
                chosen = next(([case] for case in (*cases, *table.cases) if _takes(subject, table, case, dtype)), [])
            for case in chosen:
                kernel = subject.target.rpartition(".")[2]
                dtype_name = str(dtype).removeprefix("torch.")
                yield f"{subject.op.name} by {kernel}, {case.name}, {dtype_name}", Tried(subject, table, case, dtype)


def _for_gpus(subject: Subject) -> bool:
    return subject.kernel is not None and GPU in subject.kernel.requires


def _takes(subject: Subject, table: CaseTable, case: Case, dtype: torch.dtype) -> bool:
    trial = Trial(subject, table, case, dtype)
    return trial.refusal(table.arguments(case, dtype=dtype, device=subject.device)) is None


PARAMETERS: dict[str, Any] = {
    "kernel": _kernels,
    "tile": lambda setting: {tile: tile for tile in (TILES[:2] if setting.tiny else TILES)},
}


def test_kernel(kernel: Tried, setting: Setting, row: Row) -> None:
    """Values and gradients, and what the first call costs beyond the second: compiling."""
    row["kernel"], row["seconds"] = kernel.subject.target, []
    for phase, table in (("forward", replace(kernel.table, gradients=())), ("forward and backward", kernel.table)):
        trial = Trial(kernel.subject, table, kernel.case, kernel.dtype)
        if phase != "forward" and not trial.differentiable:
            continue
        arguments = trial.table.arguments(kernel.case, dtype=kernel.dtype, device=setting.device)
        refusal = trial.refusal(arguments)
        if refusal is not None:
            pytest.skip(refusal)
        for _ in range(2):
            start = time.perf_counter()
            got = trial.run(arguments)
            setting.wait()
            row["seconds"].append(round(time.perf_counter() - start, 4))
        trial.assert_right(arguments, got, phase)


def relative(got: Tensor, wanted: Tensor) -> float:
    """Return the mean error over the mean."""
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).abs().mean() / wanted.abs().mean())


def require(error: float, dtype: torch.dtype, what: str) -> float:
    """Refuse a mean error, relative to the mean, that the rounding of some steps does not explain."""
    allowed = 4 * torch.finfo(dtype).eps if dtype.itemsize < 4 else 1e-5
    assert error <= allowed, f"{what}: mean error is {error:.2e} of the mean; rounding explains {allowed:.2e}"
    return error


def test_tile(tile: str, setting: Setting, row: Row) -> None:
    """A plain product with a given tile: loads through descriptors, and warps of their own for loads."""
    from kpt_triton.moe.grouped_mm import forward

    if "tma" in tile and setting.on_gpu and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("descriptors need sm90 or newer")
    dtype = setting.dtype(torch.bfloat16)
    rows, inner, columns = (160, 128, 128) if setting.tiny else (1000, 512, 384)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator) for size in ((rows, inner), (4, columns, inner)))
    x, weight = x.to(setting.device, dtype), (weight * inner**-0.5).to(setting.device, dtype).mT
    ends = [rows // 3, rows // 3, rows - 40, rows - 7]
    call = grouped_mm.bind(x, weight, torch.tensor(ends, dtype=torch.int32, device=setting.device))
    got = forward(call._replace(config={"tile": tile}))
    want = torch.zeros(rows, columns, dtype=torch.float64, device=setting.device)
    for expert, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        want[first:last] = x[first:last].double() @ weight[expert].double()
    row["relative_error"] = require(relative(got, want), dtype, tile)
