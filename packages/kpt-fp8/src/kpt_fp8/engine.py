"""A model converted for inference, with what it saves: `FP8InferenceEngine`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kpt_core import InputError

from .calibration import calibrate
from .conversion import ConversionReport, Progress, conversion_report, convert_model_to_fp8
from .linear import NONE
from .selection import chosen_layers, require_module


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of parameters and buffers of the given model and the converted one; what is shared counts once."""

    before: int
    after: int

    @property
    def saved(self) -> float:
        """The part that is saved: 0.5 where half is left."""
        return 1 - self.after / self.before if self.before else 0.0


class FP8InferenceEngine:
    """Convert a model, and run it without gradients.

    Args:
        model: with layers `nn.Linear`; it stays as it is unless `inplace`.
        granularity: what shares a scale of a weight, as `NativeFP8Linear` takes it.
        activations: likewise of the activations; `none` leaves them as they are. With `tensor` and calibration data
            they have static scales, else each call computes its own.
        calibration: batches, as `calibrate` takes them; None for no calibration.
        method: of the calibration, which looks at the layers that are converted.
        percentile: of that method, as `calibrate` takes it.
        max_batches: of the calibration; None runs all.
        dtype: of the codes.
        inplace: convert the model itself.
        include: patterns of layers, as `convert_model_to_fp8` takes them.
        exclude: likewise.
        min_features: likewise.
        progress: likewise.

    Attributes:
        model: the converted model, in evaluation mode.
        memory: bytes before and after.

    Raises:
        InputError: calibration data without `activations="tensor"`, or as in `calibrate` and `convert_model_to_fp8`.
        UnknownNameError: no such granularity or method.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        granularity: str = "row",
        activations: str = NONE,
        calibration: Iterable[Any] | None = None,
        method: str = "max",
        percentile: float = 99.99,
        max_batches: int | None = None,
        dtype: torch.dtype = torch.float8_e4m3fn,
        inplace: bool = False,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
        min_features: int = 64,
        progress: Progress | None = None,
    ) -> None:
        if calibration is not None and activations != "tensor":
            raise InputError(
                "FP8InferenceEngine: calibration is for activations='tensor', whose scales it finds; got activations="
                f"{activations!r}: give 'tensor', or leave calibration out"
            )
        require_module("FP8InferenceEngine", model)
        before = _bytes(model)
        scales = None
        if calibration is not None:
            found = chosen_layers("FP8InferenceEngine", model, include, exclude, min_features)
            layers = [each.names[0] for each in found.chosen]
            if layers:  # experts alone have no activations to quantise
                scales = calibrate(
                    model,
                    calibration,
                    method=method,
                    percentile=percentile,
                    dtype=dtype,
                    max_batches=max_batches,
                    layers=layers,
                )
        self.model = convert_model_to_fp8(
            model,
            inplace=inplace,
            granularity=granularity,
            activations=activations,
            dtype=dtype,
            include=include,
            exclude=exclude,
            min_features=min_features,
            input_scales=scales,
            progress=progress,
        ).eval()
        self.memory = MemoryUse(before, _bytes(self.model))

    @property
    def report(self) -> ConversionReport:
        """What was converted, and how good each weight is."""
        return conversion_report(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model without gradients."""
        with torch.inference_mode():
            return self.model(*args, **kwargs)


def _bytes(model: nn.Module) -> int:
    tensors = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return sum(each.nbytes for each in tensors.values())
