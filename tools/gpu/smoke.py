"""Try every kernel once, and everything else that needs a CUDA device: in about a minute, where does it break?"""

import functools
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from devices import captured
from rows import Find, LeftOutError, Row, run_rows
from setting import CHECKOUT, Setting, read_setting
from torch import Tensor, nn

import kpt_core
import kpt_moe
from kpt_backend_nvidia import BACKEND, NVIDIABackend, NVIDIAConfig, NVIDIAOptimizer, OptimizerConfig
from kpt_conformance.subject import Subject
from kpt_conformance.suite import subjects
from kpt_conformance.trial import Trial
from kpt_moe.grouped_mm import grouped_mm
from kpt_optimize.cases import Case, CaseTable

#: The cases that are tried, where a table has them; the first alone in tiny runs.
_CASES = (
    "small",
    "one token",
    "63 tokens, odd sizes",
    "63 rows, odd sizes",
    "gpt-oss options",
    "8-bit blocks",
    "groups with correction bias",
    "granite-3.1-1b-a400m",
    "whole sizes",
    "whole sizes, one scale each",
)
_TILES = ("128x128x64 w8 s3 g8", "128x128x64 w8 s3 g8 tma", "128x128x64 w8 s3 g8 tma ws")


def _jobs(setting: Setting) -> Iterator[Find]:
    yield from _kernels(setting)
    for tile in _TILES[:2] if setting.tiny else _TILES:
        yield f"grouped_mm with {tile}", functools.partial(_tile, setting, tile)
    yield "torch.compile(fullgraph=True)", functools.partial(_compiled, setting)
    yield "CUDA graph of MoELayer", functools.partial(_graph_of_layer, setting)
    yield "CUDA graph of a transformer layer", functools.partial(_graph_of_decoder, setting)
    yield "dispatch", functools.partial(_dispatched, setting)
    yield "device_info", functools.partial(_device_info, setting)
    yield "memory_stats", functools.partial(_memory_stats, setting)
    yield "prepare_model", functools.partial(_prepare, setting)
    yield "NVIDIAOptimizer('balanced')", functools.partial(_optimizer, setting)
    yield "NVIDIAMemoryManager", functools.partial(_memory_tests, setting)


def _kernels(setting: Setting) -> Iterator[Find]:
    """Each kernel of the backend on a few cases, in bfloat16, with and without gradients."""
    for subject, table in subjects("nvidia", str(setting.device)):
        wanted = setting.dtype(torch.bfloat16)
        dtype = wanted if wanted in subject.dtypes(table) else subject.dtypes(table)[0]
        cases = [case for name in _CASES for case in table.cases if case.name == name]
        if not subject.op.name.startswith("moe."):  # a vendor's library takes some of them alone
            cases = [case for case in cases if _takes(setting, subject, table, case, dtype)]
        for case in cases[:1] if setting.tiny else cases:
            name = f"{subject.op.name}, {case.name}, {str(dtype).removeprefix('torch.')}"
            yield name, functools.partial(_kernel, setting, subject, table, case, dtype)


def _takes(setting: Setting, subject: Subject, table: CaseTable, case: Case, dtype: torch.dtype) -> bool:
    trial = Trial(subject, table, case, dtype)
    return trial.refusal(table.arguments(case, dtype=dtype, device=setting.device)) is None


def _kernel(setting: Setting, subject: Subject, table: CaseTable, case: Case, dtype: torch.dtype) -> Row:
    """Values and gradients against float64, and what the first call costs beyond the second: compiling."""
    taken: list[float] = []
    for phase, of_phase in (("forward", replace(table, gradients=())), ("forward and backward", table)):
        trial = Trial(subject, of_phase, case, dtype)
        arguments = trial.table.arguments(case, dtype=dtype, device=setting.device)
        refusal = trial.refusal(arguments)
        if refusal is not None:
            raise LeftOutError(refusal)
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            got = trial.run(arguments)
            setting.wait()
            seconds.append(time.perf_counter() - start)
        trial.assert_right(arguments, got, phase)
        taken += [round(each, 4) for each in seconds]
    return {"kernel": subject.target, "seconds": taken}


def _relative(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).abs().mean() / wanted.abs().mean())


def _require(error: float, dtype: torch.dtype, what: str) -> float:
    """Refuse a mean error, relative to the mean, that the rounding of some steps does not explain."""
    allowed = 4 * torch.finfo(dtype).eps if dtype.itemsize < 4 else 1e-5
    if not error <= allowed:
        raise AssertionError(f"{what}: mean error is {error:.2e} of the mean; rounding explains {allowed:.2e}")
    return error


def _tile(setting: Setting, tile: str) -> Row:
    """A plain product with a given tile: loads through descriptors, and warps of their own for loads."""
    from kpt_triton.moe.grouped_mm import forward

    if "tma" in tile and setting.device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        raise LeftOutError("descriptors need sm90 or newer")
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
    return {"relative_error": _require(_relative(got, want), dtype, tile)}


def _layer(setting: Setting, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Tensor]:
    """A layer, and 24 tokens for it."""
    torch.manual_seed(0)
    sizes = (64, 64) if setting.tiny else (512, 256)
    config = kpt_moe.MoEConfig(hidden_size=sizes[0], num_experts=8, top_k=2, intermediate_size=sizes[1])
    dtype = setting.dtype(dtype)
    layer = kpt_moe.MoELayer(config).to(setting.device, dtype).eval()
    return layer, torch.randn(1, 24, sizes[0]).to(setting.device, dtype)


def _compiled(setting: Setting) -> Row:
    """A layer without a graph break gives what it gives uncompiled, forward and backward."""
    # In float32: elsewhere a score that is rounded in another way may route a token to another expert.
    layer, x = _layer(setting, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if setting.tiny else "inductor")
    errors = {}
    with setting.served():
        wanted = layer(x)
        parameters = list(layer.parameters())
        gradients = torch.autograd.grad(wanted.float().square().sum(), parameters)
        start = time.perf_counter()
        got = compiled(x)
        again = torch.autograd.grad(got.float().square().sum(), parameters)
        setting.wait()
        took = time.perf_counter() - start
    errors["result"] = _require(_relative(got, wanted), x.dtype, "result")
    for number, pair in enumerate(zip(again, gradients, strict=True)):
        errors[f"gradient {number}"] = _require(_relative(*pair), x.dtype, f"gradient {number}")
    return {"compiled_in": round(took, 2), "largest_relative_error": max(errors.values())}


def _graph_of_layer(setting: Setting) -> Row:
    layer, x = _layer(setting)
    return _graph(setting, lambda: layer(x), x)


def _graph_of_decoder(setting: Setting) -> Row:
    """A layer of a Hugging Face model with attention, norms, router and experts, captured as a whole."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import kpt_moe.transformers  # noqa: F401  registers "kpt"

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"head_dim": 32}  # of the class's fields, transformers types some alone
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        **sizes,
    )
    config._experts_implementation = "kpt"
    model: Any = Qwen3MoeForCausalLM(config)
    model = model.to(setting.device, setting.dtype(torch.bfloat16)).eval()
    if model.config._experts_implementation != "kpt":
        raise AssertionError(f"experts_implementation is {model.config._experts_implementation!r}")
    x = torch.randn(1, 24, 128, device=setting.device).to(model.dtype)
    place = model.model.rotary_emb(x, torch.arange(24, device=setting.device)[None])

    def call() -> Tensor:
        out = model.model.layers[0](x, position_embeddings=place)
        return out if isinstance(out, Tensor) else out[0]

    return _graph(setting, call, x)


def _graph(setting: Setting, call: Any, x: Tensor) -> Row:
    """Replays give, for other inputs with other routings, what the call gives."""
    with setting.served(), torch.no_grad(), kpt_core.record() as log:
        call()
    chosen = sorted({(s.backend, s.kernel) for s in log if s.op == "moe.experts"})
    if not all(backend.startswith("nvidia") for backend, _ in chosen) or not chosen:
        raise AssertionError(f"moe.experts was served by {chosen}")
    if setting.device.type == "cpu":
        raise LeftOutError("needs CUDA; the layer ran uncaptured")
    errors = []
    with torch.no_grad():
        (replay,) = captured([call])
        for _ in range(3):
            x.normal_()
            got = replay().clone()
            errors.append(_require(_relative(got, call()), x.dtype, "a replay"))
    return {"kernel": chosen[0][1], "largest_relative_error": max(errors)}


def _dispatched(setting: Setting) -> Row:
    """Dispatch chooses the backend's kernel for an ordinary call."""
    layer, x = _layer(setting)
    with setting.served(), torch.no_grad(), kpt_core.record() as log:
        layer(x)
    chosen = {s.op: s.identity for s in log}
    if not chosen["moe.experts"].startswith("nvidia"):
        raise AssertionError(f"moe.experts is not served by the backend: {chosen}")
    return {"chosen": chosen}


def _needs_cuda(setting: Setting) -> None:
    if setting.device.type == "cpu":
        raise LeftOutError(BACKEND.unavailable() or "run with --device cpu")


def _device_info(setting: Setting) -> Row:
    _needs_cuda(setting)
    info = BACKEND.device_info()
    if not info.memory or not info.multiprocessors or "bf16" not in info.capabilities:
        raise AssertionError(f"it lacks memory, multiprocessors or bf16: {info}")
    return {"info": _plain(asdict(info))}


def _memory_stats(setting: Setting) -> Row:
    _needs_cuda(setting)
    before = BACKEND.memory_stats()
    kept = torch.empty(64 * 2**20, dtype=torch.uint8, device=setting.device)
    after = BACKEND.memory_stats()
    if after.allocated - before.allocated < kept.nbytes:
        raise AssertionError(f"64 MiB more were allocated; before {before}, after {after}")
    return {"statistics": _plain(asdict(after))}


def _prepare(setting: Setting) -> Row:
    model = nn.Sequential(nn.Linear(30, 62), nn.GELU(), nn.Linear(62, 30))
    x = torch.randn(4, 30)
    want = model(x)
    prepared = NVIDIABackend(NVIDIAConfig(dtype=torch.bfloat16, pad=True)).prepare_model(model)
    prepared.settings.restore()
    place = next(model.parameters())
    got = model(x.to(place.device, place.dtype)).cpu()
    _require(_relative(got, want), torch.bfloat16, "the prepared model")
    if setting.device.type == "cuda" and (place.device.type, place.dtype) != ("cuda", torch.bfloat16):
        raise AssertionError(f"it is on {place.device} in {place.dtype}")
    return {"said": str(prepared)}


def _optimizer(setting: Setting) -> Row:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(setting.device).eval()
    x = torch.randn(64, 256, device=setting.device)
    skip = frozenset({"compile"}) if setting.tiny else frozenset[str]()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = NVIDIAOptimizer("balanced", config=OptimizerConfig(skip=skip, seconds=0.2)).optimize_for_inference(
            model, x
        )
    with torch.no_grad():
        error = _relative(found.model(x), model(x))
    _require(error, torch.bfloat16, "the optimised model")
    return {"report": str(found.report), "warnings": [str(warning.message) for warning in said]}


def _memory_tests(setting: Setting) -> Row:
    """The memory manager's own tests on a device."""
    _needs_cuda(setting)
    file = CHECKOUT / "packages/kpt-backend-nvidia/tests/memory/test_on_cuda.py"
    if not file.exists():
        raise LeftOutError("there is no checkout with its tests")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", str(file)]
    paths = [str(file.parents[1]), os.environ["PYTHONPATH"]]  # what the tests share lies beside their folder
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-1000:]}")
    return {"pytest": done.stdout.strip().splitlines()[-1]}


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """For JSON."""
    return {name: each if isinstance(each, int | float | str | None) else str(each) for name, each in value.items()}


if __name__ == "__main__":
    given, _ = read_setting()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        run_rows(given.out / "smoke" / "rows.jsonl", _jobs(given), given.alive)
