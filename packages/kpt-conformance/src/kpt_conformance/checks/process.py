"""What torch, Python, NumPy and the system keep for the whole thread or process, as far as it can be read."""

import contextlib
import gc
import locale
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_SEED = 20_261
_MATMUL = (
    "allow_tf32",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
    "fp32_precision",
)
#: Functions of `torch.backends.cuda` that tell a flag; they look for no device.
_OF_CUDA = (
    "flash_sdp_enabled",
    "mem_efficient_sdp_enabled",
    "math_sdp_enabled",
    "cudnn_sdp_enabled",
    "fp16_bf16_reduction_math_sdp_allowed",
    "preferred_linalg_library",
)


def arithmetic() -> list[float]:
    """Sums and products that denormals and the direction of rounding decide, of Python's and of torch."""
    tiny, one = torch.tensor([1e-40, 1.0]), torch.ones(1)
    return [*(tiny * 0.5).tolist(), *(one / 3).tolist(), *(-one / 3).tolist(), sys.float_info.min * tiny[1].item() / 2]


def state_of(device: torch.device) -> dict[str, Any]:
    """Return what a call must leave alone, by what a message calls it."""
    module: Any = getattr(torch, device.type, None)
    generator = getattr(module, "get_rng_state", None)
    numpy: Any = sys.modules.get("numpy")
    return {
        "torch's random numbers": _bytes(torch.get_rng_state()),
        "the device's random numbers": _bytes(generator(device)) if generator else None,
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": _plain(numpy.random.get_state(legacy=False)) if numpy else None,
        "what NumPy does about errors": numpy.geterr() if numpy else None,
        "how denormals and halves are rounded": arithmetic(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the current device": module.current_device() if hasattr(module, "current_device") else None,
        "the current stream": module.current_stream() if hasattr(module, "current_stream") else None,
        **modes(),
        "autocast": torch.is_autocast_enabled(device.type),
        "deterministic algorithms": torch.get_deterministic_debug_mode(),
        "what fills new memory": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "the number of threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "filters of warnings": list(warnings.filters),
        **_backends(),
        "the search for anomalies": torch.is_anomaly_enabled(),
        "the environment": dict(os.environ),
        "the working directory": os.getcwd(),
        "handlers of signals": [signal.getsignal(number) for number in _SIGNALS],
        "the search for cycles": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "the trace or profile of Python": (sys.gettrace(), sys.getprofile()),
        "limits of Python": (sys.getrecursionlimit(), sys.getswitchinterval()),
        "the locale": locale.setlocale(locale.LC_ALL),
        **_system(),
    }


_SIGNALS = sorted(signal.valid_signals())


def modes() -> dict[str, Any]:
    """Return the modes of gradients, which a test may be in."""
    return {"grad mode": torch.is_grad_enabled(), "inference mode": torch.is_inference_mode_enabled()}


def _bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _plain(state: Any) -> Any:
    """Return the same as tuples and bytes, which compare in no time."""
    if isinstance(state, dict):
        return tuple((name, _plain(value)) for name, value in state.items())
    return state.tobytes() if hasattr(state, "tobytes") else state


def _backends() -> dict[str, Any]:
    """Return every flag of `torch.backends`, and of what is in its modules."""
    found: dict[str, Any] = {"torch.backends.fp32_precision": getattr(torch.backends, "fp32_precision", None)}
    for place, holder, names in _FLAGS:
        for name in names:
            # Not every torch has all, and one that was set in two ways (TF32, of old and new kind) raises.
            with contextlib.suppress(AttributeError, RuntimeError):
                value = getattr(holder, name)
                found[f"{place}.{name}"] = value() if callable(value) else value
    return found


def _flags() -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield the places of flags in `torch.backends`: torch makes a property of its own for each."""
    for name, module in vars(torch.backends).items():
        # `m` is the same module again, as some of them name themselves.
        if not isinstance(module, ModuleType) or name == "m":
            continue
        held = {f".{inner}": each for inner, each in (*vars(type(module)).items(), *vars(module).items())}
        nested = {k: v for k, v in held.items() if type(v).__module__.startswith("torch.backends") and k != ".m"}
        for inner, holder in {"": module, **nested}.items():
            names = (n for kind in type(holder).__mro__ for n, v in vars(kind).items() if _is_flag(v))
            yield f"torch.backends.{name}{inner}", holder, tuple(dict.fromkeys(names))
    backends: Any = torch.backends
    yield "torch.backends.cuda.matmul", backends.cuda.matmul, _MATMUL
    yield "torch.backends.cuda", backends.cuda, _OF_CUDA
    yield "torch.backends.opt_einsum", backends.opt_einsum, ("enabled", "strategy")
    yield "torch.backends.mha", backends.mha, ("get_fastpath_enabled",)
    yield "torch.backends.quantized", backends.quantized, ("engine",)
    yield "torch.backends.nnpack", torch._C, ("_get_nnpack_enabled",)


def _is_flag(value: Any) -> bool:
    return type(value).__name__ == "ContextProp"


_FLAGS = tuple(_flags())


def _system() -> dict[str, Any]:
    """Return what the system keeps for a process, where it is one that tells."""
    found: dict[str, Any] = {}
    if hasattr(os, "sched_getaffinity"):
        found["the cores that it may run on"] = os.sched_getaffinity(0)
    if hasattr(os, "getpriority"):
        found["the priority"] = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        found["the umask"] = next(line for line in lines if line.startswith("Umask:"))
    with contextlib.suppress(ImportError):
        import resource

        limits = (name for name in dir(resource) if name.startswith("RLIMIT_"))
        found["limits of the system"] = {name: resource.getrlimit(getattr(resource, name)) for name in limits}
    return found


def descriptors() -> int:
    """Return how many files are open; 0 where the system does not tell."""
    return _entries("/proc/self/fd")


def tasks() -> int:
    """Return how many threads there are, of native libraries too; 0 where the system does not tell."""
    return _entries("/proc/self/task")


def _entries(folder: str) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


@contextmanager
def unusual(device: torch.device) -> Iterator[None]:
    """Make settings that no kernel would make, so that one made before is made again; put back afterwards."""
    state, threads, denormals = random.getstate(), torch.get_num_threads(), arithmetic()[0] != 0
    numpy: Any = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    apart = device.type != "cpu" and hasattr(getattr(torch, device.type, None), "get_rng_state")
    fork = torch.random.fork_rng([device] if apart else [], device_type=device.type if apart else "cuda")
    with fork, torch.enable_grad():
        try:
            torch.manual_seed(_SEED)
            random.seed(_SEED)
            if numpy:
                numpy.random.seed(_SEED)
            torch.set_num_threads(threads + 1)
            torch.set_flush_denormal(False)
            yield
        finally:
            random.setstate(state)
            torch.set_num_threads(threads)
            torch.set_flush_denormal(not denormals)
            if numpy:
                numpy.random.set_state(of_numpy)
