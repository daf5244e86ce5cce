"""The backend: what the core asks of it, and a model's way to the device."""

import importlib
from dataclasses import dataclass

import torch
from torch import nn

from kpt_core import Backend, Capability, InputError, Kernel

from .chips import CHIPS, capabilities_of
from .configuration import NVIDIAConfig
from .devices import Device, DeviceInfo, MemoryStatistics, device_index, device_info, memory_stats
from .environment import why_no_device, why_unavailable
from .settings import AppliedSettings, apply_settings
from .shapes import Padding, ShapeAdvice, advise, pad_model


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """What `prepare_model` did; `str()` of it is a sentence for each thing.

    Attributes:
        model: the model that was given.
        device: where it is now; None if it lies on several, or has no parameters and buffers.
        unavailable: why it is not on a CUDA device, None if it is.
        changes: what was done, a sentence each.
        advice: matrices of awkward sizes that are left.
        padding: what was padded, None if that was not asked for.
        settings: torch's switches that were set; `settings.restore()` gives back what was before.
    """

    model: nn.Module
    device: torch.device | None
    unavailable: str | None
    changes: tuple[str, ...]
    advice: tuple[ShapeAdvice, ...]
    padding: Padding | None
    settings: AppliedSettings

    def __str__(self) -> str:
        stays = [] if self.unavailable is None else [f"the model stays where it is: {self.unavailable}"]
        return "\n".join([*stays, *self.changes, *map(str, self.advice)]) or "nothing was changed"


class NVIDIABackend(Backend):
    """KPT's backend for NVIDIA GPUs from sm80 (Ampere) on.

    Making one costs nothing: CUDA is looked at when something is asked.

    Args:
        config: of `prepare_model`.
    """

    name = "nvidia"
    device_types = ("cuda",)
    chips = CHIPS

    def __init__(self, config: NVIDIAConfig | None = None) -> None:
        if config is not None and not isinstance(config, NVIDIAConfig):
            raise InputError(f"config must be an NVIDIAConfig; got {config!r}, see NVIDIAConfig.from_mapping")
        self.config = config or NVIDIAConfig()

    def __repr__(self) -> str:
        return f"NVIDIABackend({self.config})"

    def unavailable(self) -> str | None:
        """None if kernels can run here, else why not and what to do, in a sentence."""
        return why_unavailable()

    def capabilities(self, device: torch.device) -> frozenset[Capability]:
        """What a device can do; `cuda` is the current device.

        A device that is not here, as a fake tensor's may be, can do nothing: the set is empty.

        Raises:
            InputError: the device is of another type.
        """
        if device.type != "cuda":
            raise InputError(f"the nvidia backend describes devices of type cuda; got {device}")
        if why_no_device() is not None:
            return frozenset()
        index = device_index(torch.device("cuda")) if device == torch.device("cuda") else device.index
        if index >= torch.cuda.device_count():
            return frozenset()
        return capabilities_of(torch.cuda.get_device_capability(index))

    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel, also where none can run; nothing is compiled and Triton is not imported."""
        return tuple(importlib.import_module("kpt_backend_nvidia.moe").KERNELS)

    def device_info(self, device: Device = None, *, live: bool = True) -> DeviceInfo:
        """Everything that torch and NVML tell of a device, by default the configuration's.

        Args:
            device: which.
            live: whether NVML is asked, which takes much longer than the rest.

        Raises:
            InputError: CUDA is not there, or it has no such device.
        """
        return device_info(self.config.device if device is None else device, live=live)

    def memory_stats(self, device: Device = None) -> MemoryStatistics:
        """The memory of a device, by default the configuration's, and of this process on it.

        Raises:
            InputError: CUDA is not there, or it has no such device.
        """
        return memory_stats(self.config.device if device is None else device)

    def prepare_model(self, model: nn.Module, *, for_training: bool = False) -> PreparedModel:
        """Bring a model to the device, in place, as the configuration says.

        Its mode is set, awkward layers are padded if wanted, it is moved and cast, and torch's switches are set.
        Without a usable device the mode is set and the rest is left, so that the model runs where it is; the report
        says why. A model that lies on several devices is not moved.

        Args:
            model: parameters are replaced or moved, so make the optimiser afterwards.
            for_training: whether the mode is that of training rather than of evaluation.

        Returns:
            The same model, and what was done.

        Raises:
            InputError: `model` is no module, has parameters without data (on `meta`), or the configuration's device is
                not among those that torch sees.
            torch.OutOfMemoryError: it does not fit; it is where it was, though some parameters may be cast already.
        """
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module; got {model!r}")
        model.train(for_training)
        changes = [f"the model is in {'training' if for_training else 'evaluation'} mode"]
        unavailable = self.unavailable()
        padding = None
        settings = apply_settings(NVIDIAConfig())
        if unavailable is None:
            target = torch.device("cuda", device_index(self.config.device))
            homes = _homes(model)
            _check_data(homes)
            if self.config.pad:
                padding = self._pad(model, changes)
            self._move(model, target, homes, changes)
            settings = apply_settings(self.config)
            changes += settings.changes
            if for_training and self.config.dtype in (torch.float16, torch.bfloat16):
                changes.append(
                    f"parameters in {_short(self.config.dtype)} lose small updates; keep them in float32 and train "
                    "under torch.autocast unless your optimiser has copies"
                )
        homes = _homes(model)
        return PreparedModel(
            model=model,
            device=homes.pop() if len(homes) == 1 else None,
            unavailable=unavailable,
            changes=tuple(changes),
            advice=advise(model),
            padding=padding,
            settings=settings,
        )

    def _pad(self, model: nn.Module, changes: list[str]) -> Padding:
        padding = pad_model(model, _dtype(self.config))
        changes.append(f"{len(padding.padded)} linear layers are padded, {padding.extra_bytes:,} bytes")
        changes += [f"{name} is not padded: {reason}" for name, reason in padding.skipped.items()]
        return padding

    def _move(self, model: nn.Module, target: torch.device, homes: set[torch.device], changes: list[str]) -> None:
        if len(homes) > 1:
            changes.append(f"it lies on {', '.join(sorted(map(str, homes)))} and is not moved or cast")
            return
        dtype, cast = _dtype(self.config), ""
        if dtype is not None and any(p.is_floating_point() and p.dtype is not dtype for p in model.parameters()):
            cast = f", cast to {_short(dtype)}"
        try:
            model.to(device=target, dtype=dtype)
            if self.config.channels_last:
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types lack it
        except torch.OutOfMemoryError:
            for home in homes:  # one, or none
                model.to(home)
            raise
        changes.append(f"it is on {target}{cast}{', channels last' if self.config.channels_last else ''}")


def _homes(model: nn.Module) -> set[torch.device]:
    """Devices of a model's parameters and buffers."""
    return {tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors}


def _check_data(homes: set[torch.device]) -> None:
    if torch.device("meta") in homes:
        raise InputError(
            "the model has parameters on meta, without data; give it some first: model.to_empty(device='cuda'), then "
            "load_state_dict"
        )


def _dtype(config: NVIDIAConfig) -> torch.dtype | None:
    assert not isinstance(config.dtype, str)  # the configuration made a dtype of it
    return config.dtype


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
