"""Experts that are one by one in the files, read into the tensor that has them all: `stacking`."""

from typing import Any, Self

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

from kpt_fp8.checkpoints.folder import TensorReader


class _Stack(ConversionOps):
    """What `MergeModulelist` and `Concatenate` make, of names in the files: a matrix is read, copied, and gone."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader

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
        """Such a model is not saved."""
        return self


def _matrix(stored: Tensor) -> Tensor:
    """Weights `[N, K]` as they are; scales `[]`, `[1]`, `[N]`, `[N, 1]` or `[a, 1, b, 1]` as matrices."""
    return stored.reshape(-1, 1) if stored.dim() < 2 else stored.reshape(stored.shape[0], -1)


class _Stacking(WeightConverter):
    """Hands on names of tensors instead of what transformers reads, which is mapped memory that no one has touched."""

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: object) -> None:
        super().add_tensor(target_key, source_key, source_pattern, source_key)  # type: ignore[arg-type]


def stacks(converter: object) -> bool:
    """Whether all that a converter does is to stack matrices of experts."""
    if not isinstance(converter, WeightConverter) or len(converter.target_patterns) > 1:
        return False
    done = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
    wanted = [(MergeModulelist, 0), (Concatenate, 1)][: len(converter.source_patterns)]
    return done == wanted and all(each.endswith(".weight") for each in converter._original_source_patterns)


def stacking(converter: WeightConverter, sources: list[str], target: str, reader: TensorReader) -> WeightConverter:
    """Return a converter that stacks without a second copy, and on the CPU, so that a GPU holds the result alone."""
    made = _Stacking(sources, [target], [_Stack(reader)], force_cpu=True)
    made.scope_prefix, made.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
    return made
