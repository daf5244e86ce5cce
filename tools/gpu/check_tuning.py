"""Tune the kernels on the benchmark's shapes, for the table that the backend ships."""

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from experts import arguments_of, problem_of
from loads import LOADS, experts_contest
from rows import Row
from setting import Setting

import kpt_core
from kpt_cli.bench.moe import Shape
from kpt_core.contract import Call, load
from kpt_core.dispatch.autograd import wanted
from kpt_core.dispatch.candidates import Candidate
from kpt_core.dispatch.run import run as run_kernel
from kpt_optimize.cases import Arguments, Case, CaseTable, case_tables
from kpt_optimize.tuning import device_name
from kpt_optimize.tuning.files import merge_into
from kpt_optimize.tuning.tables import table_name
from kpt_optimize.tuning.trials import TuningResult, try_case

_SECONDS = 4.0
#: Parts of the configurations, each compiled by one check, so that several processes share them.
_SHARES = 16


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tuned: an op on the shape of a load, for calls with or without a gradient."""

    op: str
    shape: Shape
    dtype: torch.dtype
    gpt_oss: bool
    training: bool

    @property
    def name(self) -> str:
        """Return a name that is unique among the trials."""
        return f"{self.op}: {self.shape.name}{', training' if self.training else ''}"


def _trials(setting: Setting) -> list[Trial]:
    """Return what is tuned; what matters most comes first, for the time may end in between."""
    loads = [each for each in LOADS["cuda"][setting.tiny] if each.make is experts_contest]
    trials = [
        Trial("moe.experts", own["shape"], own["dtype"], own.get("gpt_oss", False), each.group == "step")
        for each in loads
        for own in [each.sizes]
        if each.group in ("prefill", "step") or own["shape"].tokens > 8
    ]
    if setting.tiny:
        prefill = next(trial for trial in trials if not trial.training)
        return [replace(prefill, op="moe.grouped_mm"), prefill]
    chosen = [trial for trial in trials if trial.dtype is torch.bfloat16]
    found = list(dict.fromkeys(sorted(chosen, key=lambda trial: trial.shape.tokens < 4096)))
    large = [trial for trial in found if not trial.training and trial.shape.tokens >= 4096]
    return found + [replace(t, op=op) for t in large for op in ("moe.grouped_mm", "moe.grouped_mm_wgrad")]


PARAMETERS: dict[str, Any] = {
    "trial": lambda setting: {trial.name: trial for trial in _trials(setting)},
    "share": lambda setting: {f"part {n + 1}": n for n in range(2 if setting.tiny else _SHARES)},
}


def test_tunes(
    trial: Trial, setting: Setting, row: Row, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest configuration is in the table that calls find."""
    folder: Path = request.config.getoption("--gpu-out").parent / "tuning"
    # Tables of this machine's user would decide what runs untuned.
    monkeypatch.setenv("KPT_TUNING", str(folder))
    kpt_core.refresh()
    table = folder / table_name(device_name(setting.device))
    result = _try_products(setting, trial) if trial.op == "moe.experts" else _try(setting, trial)
    row["refused"] = [str(refusal) for refusal in result.left_out if refusal.of_call]
    assert result.entry is not None, "nothing was timed"
    merge_into(table, device_name(setting.device), [result.entry])
    row |= {"entry": asdict(result.entry), "table": str(table)}


def _try(setting: Setting, trial: Trial) -> TuningResult:
    return try_case(
        kpt_core.get_op(trial.op),
        _case_table(setting, trial),
        Case(name=trial.shape.name),
        device=setting.device,
        dtype=trial.dtype,
        seconds=0.01 if setting.tiny else _SECONDS,
        training=trial.training,
    )


def _try_products(setting: Setting, trial: Trial) -> TuningResult:
    """Tune one product of the experts after the other, each with the tiles that were best for those before it.

    The kernel's own configurations change one product each, so that their winner alone would leave the others as they
    are.
    """
    from kpt_triton.moe import configs

    single = configs.experts(_call(setting, trial))
    products: dict[str, list[str]] = {}
    for config in single:
        for product, tile in config.items():
            if tile:
                products.setdefault(product, []).append(tile)
    best = dict.fromkeys(single[0], "")
    result: TuningResult | None = None
    for product, tiles in products.items():
        chosen = tiles[:2] if setting.tiny else tiles
        offered = [{**best, product: tile} for tile in chosen] + ([best] if any(best.values()) else [])
        with mock.patch.object(configs, "experts", lambda call, offered=offered: offered):
            result = _try(setting, trial)
        if result.entry is not None and result.entry.config is not None:
            best = dict(result.entry.config)
    assert result is not None  # there are products
    return result


def _case_table(setting: Setting, trial: Trial) -> CaseTable:
    """Return the op's own table, with a case that is made on the device: these are large."""
    table = case_tables()[trial.op]
    return replace(table, build=lambda generator: _arguments(setting, trial), cases=(Case(name=trial.shape.name),))


def _call(setting: Setting, trial: Trial) -> Call:
    """Return a trial's call, whose arguments want a gradient if it is a training step's."""
    op = kpt_core.get_op(trial.op)
    call = op.bind(**_arguments(setting, trial))
    for name in case_tables()[trial.op].gradients if trial.training else ():
        if getattr(call, name) is not None:
            getattr(call, name).requires_grad_()
    return call._replace(needs=wanted(op, call) if trial.training else ())


def _arguments(setting: Setting, trial: Trial) -> Arguments:
    problem = problem_of(trial.shape, trial.dtype, setting.device, 0, gpt_oss=trial.gpt_oss)
    index, weights = problem.routings[0]
    # The parameters are kept from one problem to the next, and may not all want a gradient.
    own = {name: t.detach() if isinstance(t, torch.Tensor) else t for name, t in arguments_of(problem, 0).items()}
    if trial.op == "moe.experts":
        return {"x": problem.x, "top_k_index": index, "top_k_weights": weights, **own}
    expert, order = index.flatten().sort(stable=True)
    ids = torch.arange(trial.shape.num_experts, device=setting.device)
    offsets = torch.searchsorted(expert, ids, right=True).int()
    rows = problem.x[order // trial.shape.top_k]
    up = own["gate_up_proj"] if trial.gpt_oss else own["gate_up_proj"].mT
    if trial.op == "moe.grouped_mm":
        return {"x": rows, "weight": up, "offsets": offsets}
    grad = torch.randn(rows.shape[0], up.shape[2], device=setting.device).to(rows.dtype)
    return {"x": rows, "grad": grad, "offsets": offsets}


def test_compiles(share: int, setting: Setting) -> None:
    """Every n-th configuration of every trial runs once: Triton keeps what is compiled."""
    of = 2 if setting.tiny else _SHARES
    for trial in _trials(setting):
        with torch.set_grad_enabled(trial.training):
            op, call = kpt_core.get_op(trial.op), _call(setting, trial)
            taking = [c for c in op.candidates(call.x.device, call.x.dtype).accepted if c.refusal(call) is None]
            configured = [c for c in taking if c.kernel.configs is not None]
            options = [
                (c, call._replace(config=each)) for c in configured for each in load(c.kernel.configs or "")(call)
            ]
            for candidate, own in options[share::of]:
                _run_once(op, candidate, own)
        del call, options


def _run_once(op: kpt_core.Op[..., Any], candidate: Candidate, call: Call) -> None:
    try:
        out = run_kernel(op, candidate, call)
        if call.needs:
            leaves = [getattr(call, name) for name in call.needs]
            torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
    except Exception as error:  # tuning meets it again and says so
        sys.stderr.write(f"{op.name} with {call.config}: {type(error).__name__}: {str(error).splitlines()[0]}\n")
