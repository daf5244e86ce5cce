"""Modules with an `FP8Tensor` for a parameter: their state dicts hold codes and scale as plain tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kpt_core import InputError

from .fp8_tensor import FP8Tensor
from .scales import scale_shape


class FP8Module(nn.Module):
    """A module whose state dict has codes under the name of the parameter, and their scale under that with `_scale`.

    Plain tensors are what safetensors and other tools take; where the parameter is sharded they are DTensors. Loading
    copies nothing into a module where a weight has another format, or codes come without their scale.
    """

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._quantized():
            key = f"{prefix}{name}"
            destination[key], destination[f"{key}_scale"] = separate(destination[key])

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        wrong: list[str] = []
        for name, own in self._quantized().items():
            state_dict, reasons = read(state_dict, f"{prefix}{name}", own)
            wrong += reasons
        if wrong:
            error_msgs.extend(wrong)
            return
        before = len(missing_keys)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        quantized = {f"{prefix}{name}" for name in self._quantized()}
        missing_keys.extend(f"{key}_scale" for key in missing_keys[before:] if key in quantized)

    def _quantized(self) -> dict[str, Tensor]:
        return {
            name: each
            for name, each in self._parameters.items()
            if isinstance(getattr(each, "_local_tensor", each), FP8Tensor) and each is not None
        }


def bytes_of(module: nn.Module) -> int:
    """Count the bytes of a module's parameters."""
    return sum(parameter.nbytes for parameter in module.parameters())


def separate(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale of an `FP8Tensor`, sharing its memory; of a DTensor of one: two DTensors, sharded alike."""
    local = getattr(weight, "_local_tensor", None)
    if local is None:
        return weight.codes, weight.scale  # type: ignore[attr-defined]
    whole = scale_shape(weight.shape, local.granularity)
    return _distributed(local.codes, weight.shape, weight), _distributed(local.scale, whole, weight)


def combine(codes: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """The other way round: what `like` is, an `FP8Tensor` or a DTensor of one, of other codes and scale."""
    local, parts = getattr(like, "_local_tensor", None), [getattr(t, "_local_tensor", None) for t in (codes, scale)]
    if local is None and parts == [None, None]:
        return like.like(codes, scale)  # type: ignore[attr-defined,no-any-return]
    if local is None or any(part is None for part in parts):
        raise InputError(
            "FP8Tensor: weight and scales must both be DTensors where the layer is sharded, and plain tensors where it "
            "is not: load through torch.distributed.checkpoint.state_dict.set_model_state_dict"
        )
    return _distributed(local.like(*parts), codes.shape, like)


def _distributed(local: Tensor, shape: Sequence[int], like: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    placements = like.placements if len(shape) else [Replicate()] * len(like.placements)
    size = torch.Size(shape)
    strides = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, placements, run_check=False, shape=size, stride=strides)


def read(state: Mapping[str, Any], name: str, own: Tensor) -> tuple[dict[str, Any], list[str]]:
    """Take codes and scale out of a state dict, for a weight that is there.

    Returns:
        The state dict with what `own` is under `name`; and sentences about what does not fit, if anything does not.
    """
    names = name, f"{name}_scale"
    left = {each: value for each, value in state.items() if each not in names}
    given = {each: state[each] for each in names if each in state}
    # Copying would convert codes without their scales, or round scales, and say nothing.
    wrong = [
        f"{each} must be {part.dtype}; got {value.dtype}: load into the model as it was, then convert it; or convert "
        "with the format of the checkpoint"
        for each, part in zip(names, separate(own), strict=True)
        if isinstance(value := given.get(each), Tensor) and value.dtype is not part.dtype
    ]
    if not wrong and len(given) == 1:
        there, missing = names if name in given else names[::-1]
        wrong = [f"{there} has no {missing}, and codes mean nothing without their scales: load both"]
    if wrong or not given:
        return left, wrong
    try:
        return {**left, name: combine(given[names[0]], given[names[1]], own)}, []
    except InputError as error:
        return left, [f"{name}: {error}"]
