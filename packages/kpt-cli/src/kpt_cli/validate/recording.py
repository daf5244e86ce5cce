"""Record a golden trace: run a model as the user asked, run it in float64, keep both."""

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import distributions, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from kpt_cli.errors import CliError

from .arms import ORACLE, Arm
from .bounds import Rounding
from .float64 import in_float64, widened
from .gradients import run_backward
from .model_source import users_code
from .observing import Observer
from .routing import find_routing
from .steering import Steer, following, forcing
from .trace import About, Call, Layer, Trace
from .weights import config_of, weights_of

#: Told what goes on, and how much of how much is done; the whole is None where nobody knows.
Tell = Callable[[int, int | None, str], None]
#: Positional and keyword arguments.
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def silent(done: int, total: int | None, what: str) -> None:
    """Tell nobody."""


def record(
    model: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    arm: Arm | None = None,
    layers: str | None = None,
    gradients: bool = False,
    name: str = "",
    said: str = "",
    load_dtype: str | None = None,
    tell: Tell = silent,
) -> Trace:
    """Run a model and its float64 reference, and keep what every module gave.

    The reference has the same weights, widened, and runs on the CPU. Where its own choice of experts differs from the
    run's, it follows the run's: else everything after that token would differ, and no error could be told. It runs once
    as a whole, and once with every module fed what it was fed in the recorded run.

    Args:
        model: a module in the dtype, and on the device, that are recorded; it is put into evaluation mode.
        inputs: positional or keyword arguments of the model, tensors and plain values.
        arm: what serves experts and ops; KPT's kernels, chosen automatically, if None.
        layers: keep only calls of modules whose path matches this pattern (`*` and `?`), and those that route.
        gradients: keep gradients of the embeddings and all parameters too, see `run_backward`.
        name: how the user names the model, for a replay that is to load it again.
        said: a sentence on the inputs.
        load_dtype: what a replay is to load it in; `auto` for as it is, and the dtype of most weights if None.
        tell: told how far it is.

    Raises:
        CliError: the pattern matches nothing, or the model does not run.
        KptError: the arm names what is not installed or can't run.
    """
    arm = arm or Arm()
    call = as_call(inputs)
    dtype, device = str(dtype_of(model)).removeprefix("torch."), device_of(model)
    model.eval()
    weights, wide = weights_of(model), widened(model)  # as they are before a run, which may change buffers
    calls = observe(model, fresh(call), arm, None, tell, "recording").calls
    kept = [call for call in calls if layers is None or _wanted(call, layers)]
    if layers is not None and not any(fnmatchcase(call.key, layers) for call in calls):
        raise CliError(f"--layers {layers}: no module has such a path; for instance {calls[0].key!r} is one")
    steer = following(calls)
    with in_float64():
        total = len(calls)
        oracle = observe(wide, _wide(call), ORACLE, steer, tell, "float64", total).calls
        each = observe(wide, _wide(call), ORACLE, forcing(calls), tell, "float64, each alone", total).calls
    reference, alone = ({call.key: call for call in found} for found in (oracle, each))
    upto, rounding = {}, Rounding()
    for made in calls:
        upto[made.key] = rounding = rounding.then(made.lengths)
    traced = tuple(
        Layer(
            key=made.key,
            type=made.type,
            inputs=made.inputs,
            outputs=made.outputs,
            reference=reference[made.key].outputs,
            alone=alone[made.key].outputs,
            handed=alone[made.key].inputs,
            kernels=made.kernels,
            lengths=made.lengths,
            upto=upto[made.key],
        )
        for made in kept
        if made.key in reference and made.key in alone
    )
    args, kwargs = fresh(call, torch.device("cpu"))
    return Trace(
        about=About(
            model=name,
            model_class=type(model).__name__,
            config=config_of(model),
            weights=weights,
            dtype=dtype,
            load_dtype=load_dtype or dtype,
            device=_device_name(device),
            arm=arm.name,
            versions=_versions(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            said=said,
        ),
        args=args,
        kwargs=kwargs,
        layers=traced,
        gradients=_record_gradients(model, wide, call, arm, traced, rounding, tell) if gradients else (),
    )


def _record_gradients(
    model: nn.Module,
    wide: nn.Module,
    call: _Arguments,
    arm: Arm,
    layers: Sequence[Layer],
    forward: Rounding,
    tell: Tell,
) -> tuple[Layer, ...]:
    """Both runs follow the recorded routing where they differ, so that no gradient flows through a choice there."""
    steer = following(layers)
    tell(0, None, "gradients")
    with arm.running(model), Observer(model, steer), must_run(model, "gradients"):
        narrow = run_backward(model, *fresh(call))
    with ORACLE.running(wide), in_float64(), Observer(wide, steer), must_run(wide, "gradients in float64"):
        exact = dict(run_backward(wide, *_wide(call)))
    return tuple(
        Layer(key=name, type="gradient", outputs=(gradient,), reference=(exact[name],), upto=forward.backward())
        for name, gradient in narrow
        if name in exact
    )


def observe(
    model: nn.Module,
    call: _Arguments,
    arm: Arm,
    steer: Steer | None,
    tell: Tell,
    what: str,
    total: int | None = None,
) -> Observer:
    """Run a model once and collect its calls.

    Raises:
        CliError: the model does not run.
    """
    done = 0

    def on_call(key: str) -> None:
        nonlocal done
        done += 1
        tell(done, total, f"{what}: {key or type(model).__name__}")

    with arm.running(model), torch.no_grad(), Observer(model, steer, on_call) as observer, must_run(model, what):
        args, kwargs = call
        model(*args, **kwargs)
    if not observer.calls:
        raise CliError(f"{type(model).__name__} gives no floating tensor, nor does any module in it")
    return observer


def must_run(model: nn.Module, what: str) -> AbstractContextManager[None]:
    """Say so in a sentence if the model does not."""
    return users_code(f"{type(model).__name__} does not run on the inputs ({what})")


def as_call(inputs: Sequence[Any] | Mapping[str, Any]) -> _Arguments:
    """Positional and keyword arguments."""
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def fresh(call: _Arguments, device: torch.device | None = None, dtype: torch.dtype | None = None) -> _Arguments:
    """Copies for one run, since a model may write into its arguments; on another device or in another dtype."""

    def copied(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(device or tensor.device, wanted, copy=True)

    made: _Arguments = tree_map_only(Tensor, copied, call)
    return made


def call_of(trace: Trace, model: nn.Module, dtype: torch.dtype | None) -> _Arguments:
    """The recorded arguments on the model's device; floating ones in `dtype`, if that is another one."""
    return fresh((trace.args, trace.kwargs), device_of(model), dtype)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of most of a model's floating parameters, float32 if it has none."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's first parameter is."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _wide(call: _Arguments) -> _Arguments:
    return fresh(call, torch.device("cpu"), torch.float64)


def _wanted(call: Call, pattern: str) -> bool:
    return fnmatchcase(call.key, pattern) or any(map(find_routing, (call.inputs, call.outputs)))


def _device_name(device: torch.device) -> str:
    from kpt_cli.devices import present

    return next((f"{d.device} ({d.name})" for d in present().devices if d.type == device.type), str(device))


def _versions() -> dict[str, str]:
    ours = sorted(d.name for d in distributions() if d.name.startswith("kpt-"))
    names = ("torch", "transformers", *ours)
    return {"python": platform.python_version()} | {name: version(name) for name in names}
