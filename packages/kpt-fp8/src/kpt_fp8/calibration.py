"""Static scales of activations, found by running a model on data: `calibrate`."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from kpt_core import InputError

from .experts import inputs_of, is_stacked
from .formats import require_fp8
from .magnitudes import Largest, Magnitudes, check_method
from .native_linear import ACTIVATION_DTYPES
from .selection import require_module
from .trials import call, each_batch, evaluating

#: Called with the number of batches done.
Progress = Callable[[int], None]


def calibrate(
    model: nn.Module,
    data: Iterable[Any],
    *,
    method: str = "max",
    percentile: float = 99.99,
    dtype: torch.dtype = torch.float8_e4m3fn,
    max_batches: int | None = None,
    layers: Collection[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Run a model on data, and choose for each linear layer and each expert's matrices what to divide their inputs by.

    The model runs in evaluation mode without gradients, and is left as it was. `convert_model_to_fp8(model,
    activations="tensor", input_scales=calibrate(model, data))` uses the result.

    Args:
        model: with layers `nn.Linear` or `NativeFP8Linear`.
        data: batches: a tensor, which the model is called with; a mapping of keyword arguments; or a list or tuple of
            positional ones.
        method: `max`, by the largest magnitude; `percentile`, by that which so many percent do not exceed; or `mse`, by
            the clipping with the least squared error. The last two count magnitudes in 2,048 bins on the CPU; the first
            stays on the device of the model, and waits for it once, at the end.
        percentile: of that method, above 0 and up to 100.
        dtype: of the weights' codes, as `convert_model_to_fp8` takes it; activations beside e5m2 are e4m3.
        max_batches: stop after so many; None runs all.
        layers: names of the layers, or modules of experts, to look at; None looks at all.
        progress: called after each batch with the number of batches done.

    Returns:
        By name of the layer, one positive number. Layers that were not called are not in it. Experts as transformers
        fuses them have one for each matrix, by the names that checkpoints give these (`mlp.experts.0.gate_proj`); an
        expert that no token was sent to has the largest of the others.

    Raises:
        InputError: no linear layer was called, there was no batch, `data` is a batch itself, a name is none of a linear
            layer, or an argument does not fit.
        UnknownNameError: no such method.
    """
    owner = "calibrate"
    require_fp8(owner, "dtype", dtype)
    check_method(method, percentile)
    chosen = _layers(owner, model, layers)
    seen: dict[str, Largest | Magnitudes] = defaultdict(Largest if method == "max" else Magnitudes)
    with evaluating(model), ExitStack() as stack:
        for name, layer in chosen.items():

            def count(
                layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any], name: str = name, seen: Any = seen
            ) -> None:
                if isinstance(layer, nn.Linear):
                    seen[name].add(args[0] if args else named["input"])
                    return
                for part, rows in inputs_of(layer, *args, **named):
                    seen[f"{name}.{part}"].add(rows)

            stack.callback(layer.register_forward_pre_hook(count, with_kwargs=True).remove)
        for done, batch in enumerate(each_batch(owner, data, max_batches), start=1):
            call(model, batch)
            if progress is not None:
                progress(done)
    codes = ACTIVATION_DTYPES[dtype]
    found = {
        name: each.scale(codes) if isinstance(each, Largest) else each.scale(codes, method, percentile)
        for name, each in seen.items()
        if each.any
    }
    if not found:
        raise InputError(f"{owner}: no linear layer was called with finite numbers: check the data and the model")
    return found | _unreached(chosen, found)


def _unreached(chosen: dict[str, nn.Module], found: dict[str, float]) -> dict[str, float]:
    """Return scales for the experts that no token was sent to."""
    made: dict[str, float] = {}
    for name, module in chosen.items():
        if isinstance(module, nn.Linear):
            continue
        count = next(module.parameters()).shape[0]
        for part in ("gate_proj", "up_proj", "down_proj"):
            own = {expert: found.get(f"{name}.{expert}.{part}") for expert in range(count)}
            most = max((each for each in own.values() if each is not None), default=None)
            if most is not None:
                made |= {f"{name}.{expert}.{part}": most for expert, scale in own.items() if scale is None}
    return made


def _layers(owner: str, model: nn.Module, names: Collection[str] | None) -> dict[str, nn.Module]:
    require_module(owner, model)
    every: dict[str, nn.Module] = {
        name: each
        for name, each in model.named_modules(remove_duplicate=names is None)
        if isinstance(each, nn.Linear) or is_stacked(each)
    }
    if not every:
        raise InputError(f"{owner}: model has no nn.Linear; got {type(model).__name__}: pass the model to be converted")
    unknown = [name for name in names or () if name not in every]
    if unknown:
        raise InputError(
            f"{owner}: layers has {unknown[0]!r}, which is no linear layer of the model; the first of its {len(every)} "
            f"are {', '.join(map(repr, list(every)[:5]))}: correct the name, or leave it out"
        )
    return every if names is None else {name: every[name] for name in names}
