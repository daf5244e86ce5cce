"""What users call, on a device: compiled, as CUDA graphs, by dispatch, and the backend's own tools."""

import os
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from typing import Any

import pytest
import torch
from check_numbers import relative, require
from devices import captured
from packages import CHECKOUT
from rows import Row
from setting import Setting, need_gpu
from torch import Tensor, nn

import kpt_core
import kpt_moe
from kpt_backend_nvidia import BACKEND, NVIDIABackend, NVIDIAConfig, NVIDIAOptimizer, OptimizerConfig


def _layer(setting: Setting, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Tensor]:
    """A layer, and 24 tokens for it."""
    torch.manual_seed(0)
    sizes = (64, 64) if setting.tiny else (512, 256)
    config = kpt_moe.MoEConfig(hidden_size=sizes[0], num_experts=8, top_k=2, intermediate_size=sizes[1])
    dtype = setting.dtype(dtype)
    layer = kpt_moe.MoELayer(config).to(setting.device, dtype).eval()
    return layer, torch.randn(1, 24, sizes[0]).to(setting.device, dtype)


def test_torch_compile_without_a_graph_break(setting: Setting, row: Row) -> None:
    """A layer without a graph break gives what it gives uncompiled, forward and backward."""
    # In float32: elsewhere a score that is rounded in another way may route a token to another expert.
    layer, x = _layer(setting, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager" if setting.tiny else "inductor")
    errors = {}
    wanted = layer(x)
    parameters = list(layer.parameters())
    gradients = torch.autograd.grad(wanted.float().square().sum(), parameters)
    start = time.perf_counter()
    got = compiled(x)
    again = torch.autograd.grad(got.float().square().sum(), parameters)
    setting.wait()
    row["compiled_in"] = round(time.perf_counter() - start, 2)
    errors["result"] = require(relative(got, wanted), x.dtype, "result")
    for number, pair in enumerate(zip(again, gradients, strict=True)):
        errors[f"gradient {number}"] = require(relative(*pair), x.dtype, f"gradient {number}")
    row["largest_relative_error"] = max(errors.values())


def test_cuda_graph_of_a_layer_of_experts(setting: Setting, row: Row) -> None:
    """Replays for other tokens."""
    layer, x = _layer(setting)
    _graph(setting, row, lambda: layer(x), x)


def test_cuda_graph_of_a_transformer_layer(setting: Setting, row: Row) -> None:
    """Attention, norms, router and experts of a Hugging Face model, captured as a whole."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import kpt_attention.transformers  # noqa: F401  both register "kpt"
    import kpt_moe.transformers  # noqa: F401

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
    config._experts_implementation = config._attn_implementation = "kpt"
    model: Any = Qwen3MoeForCausalLM(config)
    model = model.to(setting.device, setting.dtype(torch.bfloat16)).eval()
    if model.config._experts_implementation != "kpt":
        raise AssertionError(f"experts_implementation is {model.config._experts_implementation!r}")
    x = torch.randn(1, 24, 128, device=setting.device).to(model.dtype)
    place = model.model.rotary_emb(x, torch.arange(24, device=setting.device)[None])

    def call() -> Tensor:
        out = model.model.layers[0](x, position_embeddings=place)
        return out if isinstance(out, Tensor) else out[0]

    _graph(setting, row, call, x)


def _graph(setting: Setting, row: Row, call: Any, x: Tensor) -> None:
    """Replays give, for other inputs with other routings, what the call gives."""
    with torch.no_grad(), kpt_core.record() as log:
        call()
    chosen = sorted({(s.backend, s.kernel) for s in log if s.op == "moe.experts"})
    if not all(backend.startswith("nvidia") for backend, _ in chosen) or not chosen:
        raise AssertionError(f"moe.experts was served by {chosen}")
    row["kernels"] = sorted({f"{s.op}: {s.identity}" for s in log})
    need_gpu(setting, "needs CUDA; the layer ran uncaptured")
    errors = []
    with torch.no_grad():
        (replay,) = captured([call])
        for _ in range(3):
            x.normal_()
            got = replay().clone()
            errors.append(require(relative(got, call()), x.dtype, "a replay"))
    row["largest_relative_error"] = max(errors)


def test_dispatch_of_a_layer(setting: Setting, row: Row) -> None:
    """Dispatch chooses the backend's kernel for an ordinary call."""
    layer, x = _layer(setting)
    with torch.no_grad(), kpt_core.record() as log:
        layer(x)
    chosen = {s.op: s.identity for s in log}
    if not chosen["moe.experts"].startswith("nvidia"):
        raise AssertionError(f"moe.experts is not served by the backend: {chosen}")
    row["chosen"] = chosen


def test_device_info(setting: Setting, row: Row) -> None:
    """The device has a memory, multiprocessors and bf16."""
    need_gpu(setting, BACKEND.unavailable() or "run with --dry-run")
    info = BACKEND.device_info()
    if not info.memory or not info.multiprocessors or "bf16" not in info.capabilities:
        raise AssertionError(f"it lacks memory, multiprocessors or bf16: {info}")
    row["info"] = _plain(asdict(info))


def test_memory_stats(setting: Setting, row: Row) -> None:
    """What is allocated is counted."""
    need_gpu(setting, BACKEND.unavailable() or "run with --dry-run")
    before = BACKEND.memory_stats()
    kept = torch.empty(64 * 2**20, dtype=torch.uint8, device=setting.device)
    after = BACKEND.memory_stats()
    if after.allocated - before.allocated < kept.nbytes:
        raise AssertionError(f"64 MiB more were allocated; before {before}, after {after}")
    row["statistics"] = _plain(asdict(after))


def test_prepare_model(setting: Setting, row: Row) -> None:
    """The prepared model gives what the model gave."""
    model = nn.Sequential(nn.Linear(30, 62), nn.GELU(), nn.Linear(62, 30))
    x = torch.randn(4, 30)
    want = model(x)
    prepared = NVIDIABackend(NVIDIAConfig(dtype=torch.bfloat16, pad=True)).prepare_model(model)
    prepared.settings.restore()
    place = next(model.parameters())
    got = model(x.to(place.device, place.dtype)).cpu()
    require(relative(got, want), torch.bfloat16, "the prepared model")
    if setting.on_gpu and (place.device.type, place.dtype) != ("cuda", torch.bfloat16):
        raise AssertionError(f"it is on {place.device} in {place.dtype}")
    row["said"] = str(prepared)


def test_optimizer(setting: Setting, row: Row) -> None:
    """The optimised model gives what the model gave."""
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
        error = relative(found.model(x), model(x))
    require(error, torch.bfloat16, "the optimised model")
    row |= {"report": str(found.report), "warnings": [str(warning.message) for warning in said]}


def test_memory_manager(setting: Setting, row: Row) -> None:
    """The memory manager's own tests on a device."""
    need_gpu(setting, BACKEND.unavailable() or "run with --dry-run")
    file = CHECKOUT / "packages/kpt-backend-nvidia/tests/memory/test_on_cuda.py"
    if not file.exists():
        pytest.skip("there is no checkout with its tests")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", str(file)]
    paths = [str(file.parents[1]), os.environ["PYTHONPATH"]]  # what the tests share lies beside their folder
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-1000:]}")
    row["pytest"] = done.stdout.strip().splitlines()[-1]


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """For JSON."""
    return {name: each if isinstance(each, int | float | str | None) else str(each) for name, each in value.items()}
