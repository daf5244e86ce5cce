"""Record a golden trace: run a model as the user asked, run it in float64, keep both."""

import platform
from collections.abc import Callable, Mapping, Sequence
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
from .observing import Call, Follow, Force, Observer, Steer
from .routing import differing_rows, find_routing
from .trace import About, Layer, Trace
from .weights import config_of, weights_of

#: Told what goes on, and how much of how much is done; the whole is None where nobody knows.
Tell = Callable[[int, int | None, str], None]


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
        tell: told how far it is.

    Raises:
        CliError: the pattern matches nothing, or the model does not run.
        KptError: the arm names what is not installed or can't run.
    """
    arm = arm or Arm()
    args, kwargs = as_call(inputs)
    dtype, device = dtype_of(model), device_of(model)
    model.eval()
    calls = observe(model, args, kwargs, arm, None, tell, "recording").calls
    kept = [call for call in calls if layers is None or _wanted(call, layers)]
    if layers is not None and not any(fnmatchcase(call.key, layers) for call in calls):
        raise CliError(f"--layers {layers}: no module has such a path; for instance {calls[0].key!r} is one")
    wide = widened(model)
    steer = following(calls)
    with in_float64():
        wide_args, wide_kwargs = _wide(args), _wide(kwargs)
        total = len(calls)
        oracle = observe(wide, wide_args, wide_kwargs, ORACLE, steer, tell, "float64", total).calls
        each = observe(wide, wide_args, wide_kwargs, ORACLE, forcing(calls), tell, "float64, each alone", total).calls
    reference, alone = ({call.key: call for call in found} for found in (oracle, each))
    upto, rounding = {}, Rounding()
    for call in calls:
        upto[call.key] = rounding = rounding.then(call.lengths)
    traced = tuple(
        Layer(
            key=call.key,
            type=call.type,
            inputs=call.inputs,
            outputs=call.outputs,
            reference=reference[call.key].outputs,
            alone=alone[call.key].outputs,
            handed=alone[call.key].inputs,
            kernels=call.kernels,
            lengths=call.lengths,
            upto=upto[call.key],
        )
        for call in kept
        if call.key in reference and call.key in alone
    )
    return Trace(
        about=About(
            model=name,
            model_class=type(model).__name__,
            config=config_of(model),
            weights=weights_of(model),
            dtype=str(dtype).removeprefix("torch."),
            device=_device_name(device),
            arm=arm.name,
            versions=_versions(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            said=said,
        ),
        args=tree_map_only(Tensor, lambda t: t.detach().cpu(), args),
        kwargs=tree_map_only(Tensor, lambda t: t.detach().cpu(), kwargs),
        layers=traced,
        gradients=_record_gradients(model, wide, args, kwargs, arm, traced, rounding, tell) if gradients else (),
    )


def _record_gradients(
    model: nn.Module,
    wide: nn.Module,
    args: Any,
    kwargs: Any,
    arm: Arm,
    layers: Sequence[Layer],
    forward: Rounding,
    tell: Tell,
) -> tuple[Layer, ...]:
    """Both runs follow the recorded routing where they differ, so that no gradient flows through a choice there."""
    steer = following(layers)
    tell(0, None, "gradients")
    with arm.running(model), Observer(model, steer):
        narrow = run_backward(model, args, kwargs)
    with ORACLE.running(wide), in_float64(), Observer(wide, steer):
        exact = dict(run_backward(wide, _wide(args), _wide(kwargs)))
    return tuple(
        Layer(
            key=name,
            type="gradient",
            inputs=(),
            outputs=(gradient,),
            reference=(exact[name],),
            alone=(),
            handed=(),
            kernels=(),
            lengths=(),
            upto=forward.backward(),
        )
        for name, gradient in narrow
        if name in exact
    )


def observe(
    model: nn.Module,
    args: Any,
    kwargs: Any,
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

    with arm.running(model), torch.no_grad(), Observer(model, steer, on_call) as observer:
        try:
            model(*args, **kwargs)
        except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
            raise CliError(
                f"{type(model).__name__} does not run on the inputs ({what}): {type(error).__name__}: {error}"
            ) from error
    if not observer.calls:
        raise CliError(f"{type(model).__name__} gives no floating tensor, nor does any module in it")
    return observer


def following(layers: Sequence[Call | Layer]) -> Follow:
    """Make a run follow the routing of these calls, at least where they differ from their own reference."""
    also = {}
    for layer in layers:
        if isinstance(layer, Layer):
            routing = find_routing(layer.outputs)
            if routing is not None:
                rows = differing_rows(layer.outputs[routing.index], layer.reference[routing.index])
                also[layer.key, "outputs"] = rows
    inputs = {layer.key: layer.inputs for layer in layers}
    outputs = {layer.key: layer.outputs for layer in layers}
    return Follow(inputs, outputs, also)


def forcing(layers: Sequence[Call | Layer]) -> Force:
    """Feed a run's modules what these calls were fed."""
    return Force({layer.key: layer.inputs for layer in layers}, {layer.key: layer.outputs for layer in layers})


def as_call(inputs: Sequence[Any] | Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def call_of(trace: Trace, model: nn.Module, dtype: torch.dtype | None) -> tuple[list[Any], dict[str, Any]]:
    """The recorded arguments on the model's device; floating ones in `dtype`, if that is another one."""
    device = device_of(model)

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)

    args, kwargs = tree_map_only(Tensor, place, (list(trace.args), trace.kwargs))
    return args, kwargs


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


def _wide(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach().cpu().double() if t.is_floating_point() else t.cpu(), tree)


def _wanted(call: Call, pattern: str) -> bool:
    return fnmatchcase(call.key, pattern) or any(map(find_routing, (call.inputs, call.outputs)))


def _device_name(device: torch.device) -> str:
    from kpt_cli.devices import present

    return next((f"{d.device} ({d.name})" for d in present().devices if d.type == device.type), str(device))


def _versions() -> dict[str, str]:
    ours = sorted(d.name for d in distributions() if d.name.startswith("kpt-"))
    names = ("torch", "transformers", *ours)
    return {"python": platform.python_version()} | {name: version(name) for name in names}
