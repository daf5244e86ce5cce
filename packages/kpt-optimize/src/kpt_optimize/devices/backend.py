"""`AcceleratorBackend`: what the backends of all devices that torch itself drives (cuda, ROCm, xpu) share."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from kpt_core.contract import Backend, Capability
from kpt_core.errors import InputError
from kpt_optimize.padding import Padding, ShapeAdvice, advise, pad_model

from .config import AppliedSettings, DeviceConfig, DeviceLike, apply_settings, device_of_type
from .facts import DeviceInfo, MemoryStatistics, Peaks, live_state, memory_statistics

#: What versions of torch call the facts of `DeviceInfo`.
_PROPERTIES = {
    "memory": ("total_memory", "total_mem"),
    "multiprocessors": ("multi_processor_count", "multiprocessor_count", "max_compute_units"),
    "l2_cache": ("L2_cache_size", "l2_cache_size", "last_level_cache_size"),
    "shared_memory_per_block": ("shared_memory_per_block_optin", "local_mem_size"),
    "shared_memory_per_multiprocessor": ("shared_memory_per_multiprocessor",),
    "registers_per_multiprocessor": ("regs_per_multiprocessor",),
    "threads_per_multiprocessor": ("max_threads_per_multi_processor",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """What `prepare_model` did; `str()` of it is a sentence for each thing.

    Attributes:
        device: where the model is now; None if it lies on several, or has no parameters and buffers.
        unavailable: why it is not on an accelerator, None if it is.
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


class AcceleratorBackend(Backend):
    """A backend for devices that torch drives itself; a vendor's gives names, chips and kernels.

    Making one costs nothing: the device is looked at when something is asked.

    Args:
        config: of `prepare_model`, of the vendor's own class.
    """

    config_class: ClassVar[type[DeviceConfig]] = DeviceConfig
    #: What products can do, by the name that the driver gives; of a chip's the usual one first.
    products: ClassVar[Mapping[str, Peaks]] = {}

    def __init__(self, config: DeviceConfig | None = None) -> None:
        if config is not None and not isinstance(config, self.config_class):
            kind = self.config_class.__name__
            raise InputError(f"config must be an {kind}; got {config!r}, see {kind}.from_mapping")
        self.config = config or self.config_class()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config})"

    @abstractmethod
    def why_no_device(self) -> str | None:
        """Return why torch sees no device of this vendor, and the remedy; None if it sees one."""

    @abstractmethod
    def describe(self, properties: Any) -> dict[str, Any]:
        """Return what the vendor knows of a device by torch's properties of it.

        These are the fields `chip`, `generation`, `capabilities`, `unsupported` and `peaks` of `DeviceInfo`.
        """

    @abstractmethod
    def properties_of(self, product: str, chip: str) -> Any:
        """Return what `describe` reads of a device that is not here, as torch would tell it."""

    def unavailable(self) -> str | None:
        """Return None if kernels can run here, else why not and what to do, in a sentence."""
        return self.why_no_device()

    def capabilities(self, device: torch.device) -> frozenset[Capability]:
        """Return what a device can do; one without an index is the current device.

        A device that is not here, as a fake tensor's may be, can do nothing: the set is empty.

        Raises:
            InputError: the device is of another type.
        """
        device_of_type(device, self.device_types[0])
        try:
            found = self.device(device)
        except InputError:
            return frozenset()
        properties = torch.get_device_module(found).get_device_properties(found.index)
        capabilities: frozenset[Capability] = self.describe(properties)["capabilities"]
        return capabilities

    def device(self, device: DeviceLike = None) -> torch.device:
        """Return a device with its index, by default the configuration's, else the current one.

        Raises:
            InputError: there is no such device, or none at all.
        """
        kind = self.device_types[0]
        named = device_of_type(self.config.device if device is None else device, kind)
        reason = self.why_no_device()
        if reason is not None:
            raise InputError(f"{named or f'a device of type {kind}'} was asked for: {reason}")
        of = torch.get_device_module(kind)
        index = of.current_device() if named is None or named.index is None else named.index
        count = of.device_count()
        if index >= count:
            seen = f"{kind}:0 alone" if count == 1 else f"{kind}:0 to {kind}:{count - 1}"
            raise InputError(f"{kind}:{index} was asked for; torch sees {seen}")
        return torch.device(kind, index)

    def device_info(self, device: DeviceLike = None, *, live: bool = True) -> DeviceInfo:
        """Return everything that torch and the driver tell of a device, an unsupported one too.

        Args:
            device: which, by default the configuration's.
            live: whether the driver is asked for clocks and power, which takes much longer than the rest.

        Raises:
            InputError: there is no such device.
        """
        found = self.device(device)
        properties = torch.get_device_module(found).get_device_properties(found.index)
        state = live_state(found) if live else "it was not asked for"
        uuid = getattr(properties, "uuid", None)
        facts: dict[str, Any] = {
            name: next((int(value) for each in known if (value := getattr(properties, each, None)) is not None), None)
            for name, known in _PROPERTIES.items()
        }
        return DeviceInfo(
            index=found.index,
            name=properties.name,
            uuid=None if uuid is None else str(uuid),
            live=None if isinstance(state, str) else state,
            live_missing=state if isinstance(state, str) else None,
            **facts,
            **self.describe(properties),
        )

    def memory_stats(self, device: DeviceLike = None) -> MemoryStatistics:
        """Return the memory of a device, by default the configuration's, and of this process on it."""
        return memory_statistics(self.device(device))

    def prepare_model(self, model: nn.Module, *, for_training: bool = False) -> PreparedModel:
        """Bring a model to the device, in place, as the configuration says.

        Its mode is set, awkward layers are padded if wanted, it is moved and cast, and torch's switches are set.
        Without a usable device the mode is set and the rest is left, so that the model runs where it is; the report
        says why. A model that lies on several devices is not moved.

        Args:
            model: parameters are replaced or moved, so make the optimiser afterwards.
            for_training: whether the mode is that of training rather than of evaluation.

        Raises:
            InputError: `model` is no module, has parameters without data (on `meta`), or the configuration's device is
                not among those that torch sees.
            torch.OutOfMemoryError: it does not fit; it is where it was, though some parameters may be cast already.
        """
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module; got {model!r}")
        model.train(for_training)
        changes = [f"the model is in {'training' if for_training else 'evaluation'} mode"]
        unavailable, padding, settings = self.unavailable(), None, AppliedSettings()
        dtype = self.config.dtype
        assert not isinstance(dtype, str)  # the configuration made a dtype of it
        if unavailable is None:
            target = self.device()
            homes = _homes(model)
            if torch.device("meta") in homes:
                raise InputError(
                    "the model has parameters on meta, without data; give it some first: "
                    f"model.to_empty(device='{target.type}'), then load_state_dict"
                )
            if self.config.pad:
                padding = pad_model(model, dtype)
                changes.append(f"{len(padding.padded)} linear layers are padded, {padding.extra_bytes:,} bytes")
                changes += [f"{name} is not padded: {reason}" for name, reason in padding.skipped.items()]
            changes.append(self._move(model, target, homes, dtype))
            settings = apply_settings(self.config)
            changes += settings.changes
            if for_training and dtype in (torch.float16, torch.bfloat16):
                changes.append(
                    f"parameters in {_short(dtype)} lose small updates; keep them in float32 and train under "
                    "torch.autocast unless your optimiser has copies"
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

    def _move(self, model: nn.Module, target: torch.device, homes: set[torch.device], dtype: torch.dtype | None) -> str:
        """Move and cast a model, and return the sentence that says so."""
        if len(homes) > 1:
            return f"it lies on {', '.join(sorted(map(str, homes)))} and is not moved or cast"
        casts = dtype is not None and any(p.is_floating_point() and p.dtype is not dtype for p in model.parameters())
        try:
            model.to(device=target, dtype=dtype)
            if self.config.channels_last:
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types lack it
        except torch.OutOfMemoryError:
            for home in homes:  # one, or none
                model.to(home)
            raise
        cast = f", cast to {_short(dtype)}" if casts else ""
        return f"it is on {target}{cast}{', channels last' if self.config.channels_last else ''}"


def _homes(model: nn.Module) -> set[torch.device]:
    """Return the devices of a model's parameters and buffers."""
    return {tensor.device for tensors in (model.parameters(), model.buffers()) for tensor in tensors}


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
