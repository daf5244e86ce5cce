"""What transformers is told of KPT: the quantisation method "kpt_fp8", its configuration and its quantizer."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kpt_core import InputError
from kpt_fp8.checkpoints.changing import recoded
from kpt_fp8.checkpoints.folder import CheckpointFolder, TensorReader
from kpt_fp8.checkpoints.formats import Format, format_of
from kpt_fp8.checkpoints.scheme import QuantizedWeight, Scheme
from kpt_fp8.checkpoints.soundness import require_sound
from kpt_fp8.conversion import without_broadcast
from kpt_fp8.experts import NativeFP8Experts, is_stacked
from kpt_fp8.linear import NONE
from kpt_fp8.native_linear import NativeFP8Linear

from .layers import StoredLinear

METHOD = "kpt_fp8"


class _Stack(ConversionOps):
    """What `MergeModulelist` and `Concatenate` make, of names in the files: a matrix is read, copied, and gone."""

    def __init__(self, reader: TensorReader, stored: Callable[[Tensor], Tensor]) -> None:
        self._reader, self._stored = reader, stored

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # transformers copies it for each layer; files stay open

    def convert(  # type: ignore[override]  # the rest is passed by name
        self,
        input_dict: dict[str, list[str]],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str,
        model: Any,
        **_: Any,
    ) -> dict[str, Tensor]:
        """The experts' weights or scales as one tensor, those of the gate above those of the up projection."""
        dtype = model.get_parameter(full_layer_name).dtype
        named = [input_dict[pattern] for pattern in source_patterns if pattern in input_dict]
        made: Tensor | None = None
        for expert, names in enumerate(zip(*named, strict=True)):
            for place, name in enumerate(names):
                matrix = _matrix(self._reader.tensor(name))
                if made is None:
                    made = torch.empty(len(named[0]), len(named), *matrix.shape, dtype=dtype)
                made[expert, place] = matrix
        if made is None:
            raise AssertionError("transformers converts what it found")
        return {target_patterns[0]: made.flatten(1, 2)}

    @property
    def reverse_op(self) -> ConversionOps:
        """Return what a model that is saved does."""
        return _Unstack(self._stored)


class _Unstack(ConversionOps):
    """Gives the experts' weights or scales one by one, as files have them."""

    def __init__(self, stored: Callable[[Tensor], Tensor]) -> None:
        self._stored = stored

    def convert(  # type: ignore[override]  # the rest is passed by name
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, Tensor]:
        """Return by name in the files what one tensor holds."""
        (held,) = input_dict.values()
        parts = len(target_patterns)
        return {
            name.replace("*", str(expert)): self._stored(part)
            for expert, own in enumerate(held[0] if isinstance(held, list) else held)
            for name, part in zip(target_patterns, own.chunk(parts), strict=True)
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """Nothing asks for the reverse of a reverse."""
        raise NotImplementedError


def _codes(part: Tensor) -> Tensor:
    return part


def _stored_scale(form: Format, granularity: str, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """Return a scale, `[N, 1]` or `[a, b]`, in the shape of the files, and in `dtype` if that has its numbers."""
    narrow = scale.to(dtype)
    blocks = 128 if granularity == "128x128" else 1
    shape = form.stored_shape([blocks * size for size in scale.shape], granularity)
    return (narrow if torch.equal(narrow.to(scale.dtype), scale) else scale).reshape(shape)


def _stored_input_scale(form: Format, scale: Tensor) -> Tensor:
    return scale.reshape(form.stored_shape((1, 1), "tensor"))


def _matrix(stored: Tensor) -> Tensor:
    """Weights `[N, K]` as they are; scales `[]`, `[1]`, `[N]`, `[N, 1]` or `[a, 1, b, 1]` as matrices."""
    return stored.reshape(-1, 1) if stored.dim() < 2 else stored.reshape(stored.shape[0], -1)


class _Stacking(WeightConverter):
    """Hands on names of tensors instead of what transformers reads, which is mapped memory that no one has touched."""

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: object) -> None:
        held = future if isinstance(future, Tensor) else source_key  # a model that is saved has the tensor
        super().add_tensor(target_key, source_key, source_pattern, held)  # type: ignore[arg-type]


def stacks(converter: object) -> bool:
    """Tell whether all that a converter does is to stack matrices of experts."""
    if not isinstance(converter, WeightConverter) or len(converter.target_patterns) > 1:
        return False
    done = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
    wanted = [(MergeModulelist, 0), (Concatenate, 1)][: len(converter.source_patterns)]
    return done == wanted and all(each.endswith(".weight") for each in converter._original_source_patterns)


def stacking(
    converter: WeightConverter,
    sources: list[str],
    target: str,
    reader: TensorReader,
    stored: Callable[[Tensor], Tensor] = _codes,
) -> WeightConverter:
    """Return a converter that stacks without a second copy, and on the CPU, so that a GPU holds the result alone.

    `stored` gives a matrix the shape and dtype that files have, when the model is saved.
    """
    made = _Stacking(sources, [target], [_Stack(reader, stored)], force_cpu=True)
    made.scope_prefix, made.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
    return made


def _splits() -> tuple[list[WeightConverter], ...]:
    """Return converters for experts that `convert_checkpoint` split, of models that have none: with a gate, without."""
    merge, join = MergeModulelist(0), Concatenate(1)
    # With a dot before, so that shared_experts are none.
    halves = [r"\.experts.*.gate_proj.weight", r"\.experts.*.up_proj.weight"]
    down = WeightConverter([r"\.experts.*.down_proj.weight"], r"\.experts.down_proj", [merge])
    return (
        [WeightConverter(halves, r"\.experts.gate_up_proj", [merge, join]), down],
        [WeightConverter(halves[1:], r"\.experts.up_proj", [merge]), down],
    )


@register_quantization_config(METHOD)
class KptFP8Config(QuantizationConfigMixin):
    """Names KPT as what loads a checkpoint, with the `quantization_config` that this has.

    `quantized` tells by name of a weight in the files whether it is 8-bit; `key_mapping` is `from_pretrained`'s;
    `experts` runs the experts where nothing else is asked for; `scale_dtype` is that of the scales in the files.
    """

    def __init__(
        self,
        checkpoint: Mapping[str, Any],
        activations: bool = True,
        quantized: Mapping[str, bool] | None = None,
        key_mapping: Mapping[str, str] | None = None,
        experts: str = "eager",
        scale_dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers' own are an enum
        self.checkpoint = dict(checkpoint)
        self.activations = activations
        self.quantized = dict(quantized or {})
        self.key_mapping = None if key_mapping is None else dict(key_mapping)
        self.experts, self.scale_dtype = experts, scale_dtype

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json says of the checkpoint, whoever loads it."""
        return copy.deepcopy(self.checkpoint)


@register_quantizer(METHOD)
class KptFP8Quantizer(HfQuantizer):
    """Loads FP8 checkpoints into layers that stay 8-bit on every device."""

    requires_calibration = True

    quantization_config: KptFP8Config

    def __init__(self, quantization_config: KptFP8Config, **choices: Any) -> None:
        super().__init__(quantization_config, **choices)
        self.format: Format = format_of(quantization_config.checkpoint)
        self.scheme: Scheme = self.format.read_config(quantization_config.checkpoint)
        self.splits: list[WeightConverter] = []

    def update_attn_implementation(self, config: Any) -> Any:
        """Choose what runs the experts, unless it is asked for; this hook sees the configuration first."""
        for part in (config, config.get_text_config()):
            if part._experts_implementation is None:
                part._experts_implementation = self.quantization_config.experts
        return config

    def _process_model_before_weight_loading(self, model: Any, **loading: Any) -> Any:
        folder = CheckpointFolder(Path(loading["checkpoint_files"][0]).parent)
        self.reader = TensorReader(folder)
        parameters = model.state_dict()
        found = self._quantized_parameters(model, parameters)
        done: set[str] = set()
        for name, module in list(model.named_modules()):
            own = {each for each in found if each.rpartition(".")[0] == name}
            made: nn.Module | None = None
            if own and type(module) is nn.Linear:
                made = StoredLinear(module, self.format, self.scheme, found[f"{name}.weight"], folder.tensors)
            elif own and is_stacked(module):
                made = self._experts(module, model.config.get_text_config())
            if made is not None:
                model.set_submodule(name, made)
                done |= own
        if not done:
            raise InputError(
                f"kpt_fp8.transformers: {type(model).__name__} has no linear layer that the checkpoint has in 8 bits: "
                "load it with transformers"
            )
        for name in found.keys() - done:
            if name in parameters:
                kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
                raise InputError(
                    f"kpt_fp8.transformers: the checkpoint has {name} in 8 bits, and {kind} would take its codes for "
                    "numbers: exclude the module where the checkpoint is converted"
                )
        return model

    def _experts(self, module: nn.Module, config: Any) -> NativeFP8Experts:
        scheme, quantized = self.scheme, self.quantization_config.activations
        return NativeFP8Experts(
            module,
            granularity=scheme.granularity,
            dtype=scheme.dtype,
            activations=scheme.activations if quantized else NONE,
            static=scheme.static,
            input_bound=scheme.bound if quantized else None,
            config=config,
        )

    def _require_sound(self, name: str, experts: NativeFP8Experts) -> None:
        for own, _ in experts.projections():
            for expert, codes, scale, static in experts.matrices(own):
                if not codes.is_meta:
                    weight = QuantizedWeight(codes, scale, self.scheme.granularity, static)
                    require_sound(f"{own} of expert {expert} of {name}", weight)

    def _quantized_parameters(self, model: Any, parameters: dict[str, Any]) -> dict[str, str]:
        """By name of a parameter that the files have in 8 bits, as transformers renames it, a name that they have."""
        transforms = get_model_conversion_mapping(model, self.quantization_config.key_mapping)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        found = {}
        for name, quantized in self.quantization_config.quantized.items():
            own, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
            if own not in parameters and name in parameters:
                own = name  # as transformers loads it, too
            for extra in () if own in parameters or not quantized else _splits():
                other, pattern = rename_source_key(name, renamings, extra, model.base_model_prefix, parameters)
                if pattern is not None and other in parameters:
                    self.splits, own = extra, other
            if quantized:
                found[own] = name
        return found

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Converters that stack codes and scales of experts, in place of those that stack weights."""
        params = [name for name, _ in model.named_parameters()]
        made: list[Any] = []
        scale_of, input_scale_of = self._stored()
        for each in (*weight_conversions, *self.splits):
            target = each._original_target_patterns[0]
            plain = target.replace("\\", "")  # some are written as patterns
            if not stacks(each) or not any(param.endswith(f"{plain}_scale_inv") for param in params):
                made.append(each)
                continue
            sources = each._original_source_patterns
            codes = [self.format.codes_name(source) for source in sources]
            if codes != sources:
                made.append(each)  # for layers that are not quantised
            made.append(stacking(each, codes, target, self.reader))
            names = {"scale_inv": self.format.scale_name, "activation_scale": self.format.input_scale_name}
            for ending, name in names.items():
                if any(param.endswith(f"{plain}_{ending}") for param in params):
                    named = [name(source) for source in sources]
                    shaped = scale_of if ending == "scale_inv" else input_scale_of
                    made.append(stacking(each, named, f"{target}_{ending}", self.reader, shaped))
        return made

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        self.reader.close()
        for name, module in list(model.named_modules()):
            if isinstance(module, NativeFP8Experts):
                module.requires_grad_(False)  # transformers makes parameters that ask for gradients
                self._require_sound(name, module)
            elif isinstance(module, StoredLinear):
                native = module.native(name, self.quantization_config.activations)
                model.set_submodule(name, native.train(module.training))
        without_broadcast(model)
        return model

    def _stored(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Return what gives scales of weights, and static ones of activations, the form of the files."""
        scheme, dtype = self.scheme, self.quantization_config.scale_dtype
        return partial(_stored_scale, self.format, scheme.granularity, dtype), partial(_stored_input_scale, self.format)

    def is_serializable(self) -> bool:
        """Return True: in the format that it was loaded from, torchao's excepted, which has headers of its own."""
        if self.format.name == "torchao":
            raise InputError(
                "save_pretrained: a checkpoint of torchao is not written again: load one that convert_checkpoint wrote "
                "as compressed-tensors"
            )
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return what `save_pretrained` writes: codes and scales by the names of the format."""
        scale_of, input_scale_of = self._stored()
        state = {}
        modules = {name: each for name, each in model.named_modules() if isinstance(each, NativeFP8Linear)}
        for key, tensor in model.state_dict().items():
            owner, _, last = key.rpartition(".")
            if owner not in modules or last == "bias":
                state[key] = tensor
            elif last == "weight":
                held, weight = modules[owner], f"{owner}.weight"
                codes, scale, given = held.weight.codes, held.weight.scale, held.input_scale
                if codes.dtype is not self.scheme.dtype:  # of a device that multiplies fnuz alone
                    codes, scale = recoded(codes, scale, self.scheme.dtype)
                    given = None if given is None else given / 2
                state[self.format.codes_name(weight)] = codes
                state[self.format.scale_name(weight)] = scale_of(_matrix(scale))
                if self.scheme.static:
                    if given is None:
                        raise InputError(
                            f"save_pretrained: the static scale of activations of {owner} was left out when the model "
                            "was loaded: load it with quantize_activations=True"
                        )
                    state[self.format.input_scale_name(weight)] = input_scale_of(given)
        return state, {}

    @property
    def is_trainable(self) -> bool:
        """As a frozen base of adapters."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Its layers are ops, which compile."""
        return True
