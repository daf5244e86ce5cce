"""`FP8Compiler`: a model in FP8 for an NVIDIA product, what became of it, and what the product's peaks let it gain.

The work is kpt-fp8's, which is imported where something is asked; kernels are those that dispatch chooses.
"""

import importlib.util
from functools import partial
from typing import TYPE_CHECKING, Any
from warnings import warn

import torch
from torch import nn

from kpt_core import FallbackWarning, InputError
from kpt_optimize import Example, gain_of, interleaved_times
from kpt_optimize.devices import DeviceLike
from kpt_optimize.devices.targets import Target, target_of

from .backend import BACKEND
from .fp8_figures import FP8Statistics, LayerSpeedup, SpeedupEstimate, calls_of, converted_names, refusal

if TYPE_CHECKING:
    from kpt_fp8 import FP8InferenceEngine
    from kpt_fp8.training import FP8TrainingEngine

_INSTEAD = "convert_model_to_fp8 of kpt_fp8 keeps weights alone in 8 bits, which runs anywhere"


class FP8Compiler:
    """Prepare models for 8-bit products on an NVIDIA product from sm89 (Ada) on.

    Args:
        device: where prepared models run; the current one if neither it nor a target is given.
        target: a product or chip that need not be here, as `kpt plan --target` takes it: `H100`, `sm89`. Models stay
            where they are.

    Attributes:
        device: as above, with its index; None for a target.
        target: chip, product, capabilities and peaks.

    Raises:
        InputError: kpt-fp8 is not installed, there is no such device, or the chip multiplies no 8-bit numbers.
        UnknownNameError: nobody knows the target.
    """

    def __init__(self, device: DeviceLike = None, *, target: str | None = None) -> None:
        if importlib.util.find_spec("kpt_fp8") is None:
            raise InputError("FP8Compiler: kpt-fp8 is not installed: pip install ./packages/kpt-fp8")
        if device is not None and target is not None:
            raise InputError(f"FP8Compiler: give a device or a target; got {device} and {target!r}")
        if target is None and device is None and (reason := BACKEND.unavailable()) is not None:
            raise InputError(f"FP8Compiler: {reason}; or name a product that is not here: FP8Compiler(target='H100')")
        self.device = BACKEND.device(device) if target is None else None
        self.target = _of_device(self.device) if target is None else target_of(target)
        if "fp8_e4m3fn" not in self.target.capabilities or self.target.device_type != "cuda":
            raise InputError(
                f"FP8Compiler: {self.target.product} ({self.target.chip}) has no units of NVIDIA's for 8-bit products; "
                f"sm89 (Ada) or newer is needed: {_INSTEAD}"
            )

    def prepare_for_inference(
        self, model: nn.Module, *, granularity: str | None = None, activations: str | None = None, **settings: Any
    ) -> "FP8InferenceEngine":
        """Copy a model with its linear layers in FP8; the copy goes to the device, the model stays as it is.

        A `FallbackWarning` tells of layers whose 8-bit numbers the product would not multiply; with scales of rows
        those of float32 models are of them, since such products give 16 bits: `model.bfloat16()` first.

        Args:
            model: with layers `nn.Linear`.
            granularity: what shares a scale of a weight. None: a row where the chip takes that (from sm90 on) and the
                model is in bfloat16 without calibration, else the tensor.
            activations: likewise of activations; None: as the weight.
            **settings: as `FP8InferenceEngine` takes them, as `calibration`, `exclude` or `min_features`.

        Raises:
            InputError, UnknownNameError: as `FP8InferenceEngine` does.
        """
        from kpt_fp8 import FP8InferenceEngine

        rows = "tma" in self.target.capabilities and settings.get("calibration") is None
        rows = rows and next((each.dtype for each in model.parameters()), None) is torch.bfloat16
        granularity = granularity or (activations if activations != "none" else None) or ("row" if rows else "tensor")
        engine = FP8InferenceEngine(model, granularity=granularity, activations=activations or granularity, **settings)
        if self.device is not None:
            engine.model.to(self.device)
        if unserved := self.statistics(engine).unserved:
            name, reason = next(iter(unserved.items()))
            told = f"{len(unserved)} layers won't run by 8-bit products on {self.target.product}; {name}: {reason}"
            warn(FallbackWarning(f"FP8Compiler: {told}"), stacklevel=2)
        return engine

    def prepare_for_training(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any
    ) -> "FP8TrainingEngine":
        """Convert a model's linear layers for FP8 training, in place: see `kpt_fp8.training.FP8TrainingEngine`.

        Put the model on its device, and make the optimizer, before.

        Raises:
            InputError, UnknownNameError: as `FP8TrainingEngine` does.
        """
        from kpt_fp8.training import FP8TrainingEngine

        return FP8TrainingEngine(model, optimizer, **settings)

    def statistics(self, prepared: Any) -> FP8Statistics:
        """Return what is in an engine, or in a model that was converted for inference.

        Raises:
            InputError: it was not prepared.
        """
        from kpt_fp8 import NativeFP8Linear, conversion_report
        from kpt_fp8.training import FP8TrainingEngine

        if isinstance(prepared, FP8TrainingEngine):
            tensors = {id(each): each.nbytes for layer in prepared.layers.values() for each in layer.parameters()}
            size = sum(tensors.values())
            errors = {each.name: each.errors[1] for each in prepared.report.layers if len(each.errors) > 1}
            worst = max(errors, key=errors.__getitem__, default="")
            return FP8Statistics(
                layers=len(prepared.layers), left=prepared.left, bytes_before=size, bytes_after=size,
                error=errors.get(worst) or None, worst=worst,
            )  # fmt: skip
        model = _model_of(prepared)
        report = conversion_report(model)
        of_worst = min(report.layers, key=lambda each: each.quality.sqnr)
        made = {each.name: model.get_submodule(each.name) for each in report.layers}
        refused = {n: refusal(each, self.target) for n, each in made.items() if isinstance(each, NativeFP8Linear)}
        return FP8Statistics(
            layers=len(report.layers), left=report.skipped, worst=of_worst.name,
            bytes_before=sum(each.bytes_before for each in report.layers),
            bytes_after=sum(each.bytes_after for each in report.layers),
            error=10 ** (-of_worst.quality.sqnr / 20),
            unserved={name: reason for name, reason in refused.items() if reason},
        )  # fmt: skip

    def estimate_speedup(self, model: Any, sample: Any, **settings: Any) -> SpeedupEstimate:
        """Compute what FP8 gains at most over bfloat16, from each linear layer's shape and the product's peaks.

        A call takes as long as its products at the peak rate, or as weights, scales, input and result at the peak
        bandwidth: whatever is longer. Quantising, attention and all else are left out, so the whole gains less.

        Args:
            model: to be prepared, or prepared for inference.
            sample: rows that every linear layer gets; or inputs that the model runs on once, a tensor, a sequence of
                arguments or a mapping, on `meta` if the model is.
            **settings: `include`, `exclude` and `min_features`, as `prepare_for_inference` takes them.

        Raises:
            InputError: the product's peaks are not known, no layer would be converted, or none is called.
        """
        from kpt_optimize.forecast import Step  # it may import Triton

        peaks = self.target.peaks
        if peaks is None or peaks.fp8_tflops is None:
            raise InputError(
                f"FP8Compiler: no peaks are known of {self.target.product}, so nothing can be estimated: measure on "
                "the device, or take a product that `kpt_backend_nvidia.BACKEND.products` lists as target"
            )
        model = _model_of(model)
        linear = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        converted, found = converted_names(model, settings), []
        calls = [(name, sample) for name in linear] if isinstance(sample, int) else calls_of(model, linear, sample)
        for name, rows in calls:
            inputs, outputs = linear[name].in_features, linear[name].out_features
            flops, moved = 2 * rows * inputs * outputs, 2 * rows * (inputs + outputs)
            before, bound = Step(name, flops, moved + 2 * inputs * outputs).seconds(peaks, peaks.bf16_tflops)
            after = before
            if name in converted:  # with a scale for each row at most, in float32
                step = Step(name, flops, moved + inputs * outputs + 4 * outputs)
                after, bound = step.seconds(peaks, peaks.fp8_tflops)
            times: dict[str, Any] = {"before": before, "after": after, "bound": bound}
            found.append(LayerSpeedup(name=name, rows=rows, inputs=inputs, outputs=outputs, **times))
        if not found or not all(each.rows > 0 for each in found):
            raise InputError(f"FP8Compiler: no linear layer gets a row of this sample; got {len(found)} calls of them")
        return SpeedupEstimate(product=self.target.product, layers=tuple(found))

    def compile(self, prepared: Any, **options: Any) -> Any:
        """Return `torch.compile` of a prepared model, or of an engine's; the engine itself goes on uncompiled.

        Args:
            prepared: an engine, or a model that was converted for inference.
            **options: as `torch.compile` takes them.

        Raises:
            InputError: it was not prepared.
        """
        self.statistics(prepared)  # it refuses what was not prepared, or nothing would be in FP8
        return torch.compile(_model_of(prepared), **options)

    def measure(self, original: Any, prepared: Any, sample: Any, *, seconds: float = 0.6) -> tuple[float, float]:
        """Time a model and the prepared one in turn, where they are, without gradients.

        Returns:
            How many times as fast the prepared one is, and that figure's standard error.
        """
        example = Example.of(sample, "sample")
        device = next(original.parameters()).device
        with torch.inference_mode():
            times = interleaved_times(
                [partial(each, *example.args, **example.kwargs) for each in (original, prepared)], device, seconds
            )
        return gain_of(*times)


def _of_device(device: torch.device | None) -> Target:
    info = BACKEND.device_info(device, live=False)
    return Target(
        chip=info.chip, product=info.name, device_type="cuda", backend=BACKEND, capabilities=info.capabilities,
        unsupported=info.unsupported, peaks=info.peaks,
    )  # fmt: skip


def _model_of(given: Any) -> Any:
    """Return an engine's model; a model as it is."""
    model = given if isinstance(given, nn.Module) else getattr(given, "model", None)
    if not isinstance(model, nn.Module):
        raise InputError(f"FP8Compiler: needs a model or an engine; got {type(given).__name__}")
    return model
