"""Converting the linear layers and experts of a model to FP8: `convert_model_to_fp8`."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch
from torch import nn

from kpt_core import InputError

from .experts import NativeFP8Experts, is_stacked, refusal
from .formats import FP8_DTYPES
from .fp8_tensor import FP8Tensor
from .linear import NONE
from .native_linear import NativeFP8Linear, one_positive
from .quality import Quality, QualityMeter
from .selection import Chosen, Selection, chosen_layers, require_module, require_parent, require_some, trained
from .weight_state import bytes_of
from .weights import require_finite

_OWNER = "convert_model_to_fp8"
_ATTRIBUTE = "_kpt_fp8_conversion"
_Model = TypeVar("_Model", bound=nn.Module)
_Chosen = Chosen[nn.Linear] | Chosen[nn.Module]
#: Called with the number of layers done, of all, and which is next.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """What became of a layer.

    Attributes:
        name: in the model; the first one where the model shares the layer.
        shape: of the weight, N and K; of experts that of their first matrices, with the number of experts.
        bytes_before, bytes_after: of weight, scales and bias.
        quality: of the weight, overall and of its worst row.
    """

    name: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    quality: Quality


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        layers: those that were converted, in the model's order.
        skipped: by name, why another `nn.Linear`, or other experts, were left as they are.
    """

    layers: tuple[ConvertedLayer, ...]
    skipped: dict[str, str]

    def __str__(self) -> str:
        rows = [
            f"{layer.name}  {list(layer.shape)}  {layer.bytes_before} -> {layer.bytes_after} bytes  "
            f"SQNR {layer.quality.sqnr:.1f} dB, worst row {layer.quality.worst_row_sqnr:.1f} dB"
            for layer in sorted(self.layers, key=lambda layer: layer.quality.worst_row_sqnr)
        ]
        return "\n".join([*rows, *(f"{name}  left: {reason}" for name, reason in self.skipped.items())])


def convert_model_to_fp8(
    model: _Model,
    *,
    inplace: bool = False,
    granularity: str = "row",
    activations: str = NONE,
    dtype: torch.dtype = torch.float8_e4m3fn,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    min_features: int = 64,
    input_scales: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> _Model:
    """Convert each `nn.Linear` of a model to `NativeFP8Linear`; their weights are frozen from then on.

    Layers that trained in FP8 are converted likewise, from their weights of full precision.

    Experts as transformers fuses them become `NativeFP8Experts` where kpt-moe is installed, its op `moe.experts` has
    their activation, and the granularity is `row` or `128x128`; their activations are not quantised.

    Layers that tie their weight to another module stay as they are, and tied. A layer that the model uses at several
    places is converted once. Subclasses of `nn.Linear` stay as they are. The report has the reason for each. The copy
    is made while converting: it never holds a converted weight in full precision. All is checked before anything is
    changed.

    torch's nested tensors are turned off in an `nn.TransformerEncoder` that has a converted layer. Exclude layers whose
    weight another module computes with instead of calling the layer: an `FP8Tensor` refuses that. `save_pretrained` of
    transformers would write codes that `from_pretrained` takes for weights, so the result refuses it: save the state
    dict, and convert again before it is loaded. DistributedDataParallel does not broadcast converted weights: let all
    processes convert the same ones.

    Args:
        model: with weights in memory.
        inplace: convert the model itself, instead of a deep copy. Each old weight is freed as soon as nothing else
            holds it.
        granularity: what shares a scale of a weight, as `NativeFP8Linear` takes it.
        activations: what shares a scale of the activations, likewise; `none` leaves them as they are.
        dtype: of the codes.
        include: shell patterns of module names; only layers that one of them describes are converted. None: all but
            `lm_head`, which loses most; `"*"`: that too. A pattern describes a whole name or its end after a dot:
            `lm_head` describes `model.lm_head`.
        exclude: patterns of modules that are left as they are, too, with all layers in them.
        min_features: layers with fewer inputs or outputs are left as they are.
        input_scales: by name of the layer, what its activations are divided by, as `calibrate` gives it (static); with
            `activations="tensor"` alone. None: what they ask for themselves at each call (dynamic).
        progress: called with the number of layers done, of all, and the name of the next one.

    Returns:
        The copy, or `model` itself where `inplace`. `conversion_report` tells what was done.

    Raises:
        InputError: no layer is left to convert, a pattern describes no module, or a layer can't be converted: it is on
            the meta device, holds NaN or infinity, has hooks, or `input_scales` lacks it; `input_scales` has a name
            that is no layer's; or the model can't be copied.
        UnknownNameError: no such granularity.
    """
    require_module(_OWNER, model)
    if inplace:
        require_parent(_OWNER, model, "NativeFP8Linear")
    found = chosen_layers(_OWNER, model, include, exclude, min_features, take_trained=True)
    # Wrong names and formats are found before any work.
    NativeFP8Linear(1, 1, granularity=granularity, activations=activations, dtype=dtype, device="meta")
    _leave_refused_experts(found, granularity, dtype)
    _require_numbers(found)
    static = _static(model, found, input_scales, activations)

    def converted(chosen: _Chosen) -> tuple[nn.Module, ConvertedLayer]:
        made: nn.Module
        module = trained(chosen.module)
        if isinstance(module, nn.Linear):
            meter = QualityMeter()
            made = NativeFP8Linear.from_linear(
                module,
                granularity=granularity,
                activations=activations,
                dtype=dtype,
                input_scale=static.get(chosen.names[0]),
                meter=meter,
            )
            quality = meter.result()
        else:
            made, quality = NativeFP8Experts.from_experts(module, granularity=granularity, dtype=dtype)
        weight = next(made.parameters())
        return made, ConvertedLayer(
            chosen.names[0], tuple(weight.shape), bytes_of(chosen.module), bytes_of(made), quality
        )

    order = {name: place for place, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    chosen: list[_Chosen] = [*found.chosen, *found.experts]
    chosen.sort(key=lambda each: order[each.names[0]])
    found.chosen, found.experts = [], []
    report = getattr(model, _ATTRIBUTE, ConversionReport((), {}))
    convert = _in_place if inplace else _copied
    result, layers = convert(model, chosen, converted, progress or (lambda done, total, name: None))
    _without_nested_tensors(result)
    without_broadcast(result)
    if hasattr(result, "save_pretrained"):
        result.save_pretrained = _refuse_to_save  # type: ignore[assignment]
    setattr(result, _ATTRIBUTE, ConversionReport((*report.layers, *layers), found.skipped))
    return result


def conversion_report(model: nn.Module) -> ConversionReport:
    """Return what `convert_model_to_fp8` did to a model; raise `InputError` where it did nothing."""
    report = getattr(model, _ATTRIBUTE, None)
    if not isinstance(report, ConversionReport):
        raise InputError(
            f"conversion_report: model must come from {_OWNER}; got a {type(model).__name__} that does not: convert "
            "it, or pass the whole model instead of a part"
        )
    return report


_Convert = Callable[[_Chosen], tuple[nn.Module, ConvertedLayer]]


def _copied(
    model: _Model, chosen: list[_Chosen], convert: _Convert, progress: Progress
) -> tuple[_Model, list[ConvertedLayer]]:
    """A deep copy that has the converted layers wherever the model has the original ones."""
    memo: dict[int, object] = {}
    layers = []
    for done, each in enumerate(chosen):
        progress(done, len(chosen), each.names[0])
        made, layer = convert(each)
        layers.append(layer)
        memo[id(each.module)] = made
        for name, bias in _biases(each.module):
            # A bias that something else has, too, stays shared.
            copied = memo.setdefault(id(bias), nn.Parameter(bias.detach().clone(), bias.requires_grad))
            setattr(made, name, copied)
    progress(len(chosen), len(chosen), "done")
    try:
        return copy.deepcopy(model, memo), layers
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{_OWNER}: copy.deepcopy can't copy this {type(model).__name__}: {error}; convert it with inplace=True, "
            "or remove what can't be copied"
        ) from error


def _in_place(
    model: _Model, chosen: list[_Chosen], convert: _Convert, progress: Progress
) -> tuple[_Model, list[ConvertedLayer]]:
    total = len(chosen)
    layers: list[ConvertedLayer] = []
    # Taken out of the list, so that nothing here keeps an old weight.
    while chosen:
        each = chosen.pop(0)
        progress(len(layers), total, each.names[0])
        made, layer = convert(each)
        layers.append(layer)
        for name, bias in _biases(each.module):
            # An optimizer that has the bias goes on with it.
            setattr(made, name, bias)
        for name in each.names:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, made)
        del each
    progress(total, total, "done")
    return model, layers


def _biases(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, each) for name, each in module.named_parameters(recurse=False) if name.endswith("bias")]


def _leave_refused_experts(found: Selection, granularity: str, dtype: torch.dtype) -> None:
    for each in list(found.experts):
        reason = refusal(trained(each.module), granularity, dtype)
        if reason:
            found.experts.remove(each)
            found.skipped[each.names[0]] = reason
    require_some(_OWNER, found)


def _require_numbers(found: Selection) -> None:
    for each in found.chosen:
        require_finite(_OWNER, f"the weight of {each.names[0]!r}", each.module.weight)
    for chosen in found.experts:
        for name, weight in chosen.module.named_parameters(recurse=False):
            if weight.dim() == 3:
                for expert, matrix in enumerate(weight.detach()):
                    require_finite(_OWNER, f"{name} of expert {expert} of {chosen.names[0]!r}", matrix)


def _static(
    model: nn.Module, found: Selection, scales: Mapping[str, float] | None, activations: str
) -> dict[str, float]:
    """The static scale of each chosen layer, by its first name."""
    if scales is None:
        return {}
    if activations != "tensor":
        raise InputError(
            f"{_OWNER}: input_scales are for activations='tensor', one number for each layer; got activations="
            f"{activations!r}: give 'tensor', or leave input_scales out"
        )
    linear = [n for n, each in model.named_modules(remove_duplicate=False) if isinstance(each, nn.Linear)]
    # Those of experts are for checkpoints: here their activations stay as they are.
    stacked = [f"{n}." for n, each in model.named_modules(remove_duplicate=False) if is_stacked(each)]
    unknown = [name for name in scales if name not in linear and not name.startswith(tuple(stacked))]
    if unknown:
        raise InputError(
            f"{_OWNER}: input_scales has {unknown[0]!r}, which is no linear layer of the model; the first of its "
            f"{len(linear)} are {', '.join(map(repr, linear[:5]))}: calibrate this model, or correct the name"
        )
    static = {}
    for each in found.chosen:
        own = next((scales[name] for name in each.names if name in scales), None)
        if own is None:
            raise InputError(
                f"{_OWNER}: input_scales has no scale of {each.names[0]!r}; got {len(scales)} of other layers: "
                "calibrate with data that reach this layer, or exclude it"
            )
        static[each.names[0]] = one_positive(_OWNER, f"input_scales of {each.names[0]!r}", own)
    return static


def _refuse_to_save(*args: object, **named: object) -> NoReturn:
    raise InputError(
        "save_pretrained: from_pretrained would take the codes of this converted model for its weights: save its state "
        "dict, or save the original and give the folder to kpt_fp8.checkpoints.convert_checkpoint"
    )


def _without_nested_tensors(model: nn.Module) -> None:
    for encoder in model.modules():
        # torch asks the first of its layers, which may be one that was left, whether all can take nested tensors.
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(layer, NativeFP8Linear) for layer in encoder.modules()
        ):
            encoder.use_nested_tensor = False


def without_broadcast(model: nn.Module) -> None:
    """Let DistributedDataParallel pass by the weights, which are equal where all processes convert the same ones.

    It asks the module that it wraps. That of PEFT hands on what the model within says, where names are other ones.
    """
    every = model.named_parameters(remove_duplicate=False)
    weights = [name for name, each in every if isinstance(each, FP8Tensor) or each.dtype in FP8_DTYPES]
    parts = [name.rpartition(".") for name in weights]
    adapted = [f"{layer}.base_layer.{weight}" for layer, _, weight in parts]
    named = [prefix + name for prefix in ("", "base_model.model.") for name in (*weights, *adapted)]
    others = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*others, *named])
