"""The contract as data: a call's record, a kernel, a backend, a refusal."""

import importlib
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from .errors import RegistrationError

Capability = str
"""A fact about a device: `bf16`, `fp8_e4m3fn`, `tma`, `wgmma`, `sm90`, `gfx942`, `avx512`..."""

#: Names of the backend that is built in, and of no backend: the op's own body.
TORCH, REFERENCE = "torch", "reference"


class Call(tuple[Any, ...]):
    """One call of an op: a named tuple with a field for each of its parameters.

    Attributes:
        needs: names of the arguments whose gradient is wanted; empty if nothing needs to be saved.
        config: the configuration that tuning chose for the kernel; None for its default.
    """

    __slots__ = ()
    needs: tuple[str, ...]
    config: Mapping[str, Any] | None

    if TYPE_CHECKING:

        def __new__(cls, *values: Any) -> Self: ...  # noqa: D102

        def __getattr__(self, name: str) -> Any: ...

        def _replace(self, **changes: Any) -> "Call": ...

        def _asdict(self) -> dict[str, Any]: ...


def call_type(op: str, parameters: Sequence[str]) -> type[Call]:
    """The type of an op's records."""
    name = f"Call_of_{op.replace('.', '_')}"
    base: Any = namedtuple(name, [*parameters, "needs", "config"])  # type: ignore[misc]
    return type(name, (base, Call), {"__slots__": (), "__module__": __name__})


class Refusal:
    """Why a kernel does not take a call: a sentence that is put together when somebody reads it.

    Args:
        template: the sentence, with names in braces.
        values: of these names.

    Example:
        >>> str(Refusal("{tokens} tokens; this kernel is for {most} at most", tokens=100, most=64))
        '100 tokens; this kernel is for 64 at most'
    """

    __slots__ = ("template", "values")

    def __init__(self, template: str, **values: Any) -> None:
        self.template = template
        self.values = values

    def __str__(self) -> str:
        return self.template.format(**self.values)

    def __repr__(self) -> str:
        return f"Refusal({str(self)!r})"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an op, named by strings so that registering it imports nothing.

    Args:
        op: name of the op, for instance `moe.grouped_mm`.
        forward: `package.module:function`, a function of the call's record that gives the results. A kernel that has a
            backward, of an op that declares with a function what is saved, gives `(results, saved)`, where saved is
            empty unless `call.needs` names something.
        backward: a function `(call, saved, *gradients of the results)` that gives a dictionary of gradients by the
            names of arguments, None for zeros; the gradient of a result that is not used is None. It gets what
            the op changes as it was before the call. Without it the kernel is forward-only,
            unless it is `differentiable`.
        requires: capabilities that the device must have.
        priority: the higher one is tried first.
        dtypes: dtypes of the op's first tensor that are accepted, as in `"bfloat16"`; None accepts all.
        unsupported: a function of the record that gives None, or the sentence that refuses the call (`Refusal` or a
            string). What it raises propagates: a bug there must not look like a refusal.
        differentiable: the forward is plain PyTorch that autograd differentiates. One of backend `torch` also serves
            under torch.func, vmap excepted, and for derivatives of gradients.
        deterministic: repeated calls give the same bits, gradients included; the conformance suite holds it to that.
        composed_of: names of the ops that it calls, which are dispatched again.
        traceable: plain PyTorch that reads no value on the host: compilers may look into it (backend `torch` alone).
        configs: what tuning tries: a sequence, or a function of the record that gives one, of dictionaries or frozen
            dataclasses that JSON gives back as they are. The chosen one comes as `call.config`.
        aot: what is compiled ahead of time to prove the kernel on chips that are not there, see `kpt_conformance.aot`.
    """

    op: str
    forward: str
    backward: str | None = None
    requires: Set[Capability] = frozenset()
    priority: int = 0
    dtypes: Set[str] | None = None
    unsupported: str | None = None
    differentiable: bool = False
    deterministic: bool = False
    composed_of: tuple[str, ...] = ()
    traceable: bool = False
    configs: str | None = None
    aot: str | None = None

    def __post_init__(self) -> None:
        who = f"kernel {self.forward} of {self.op}"
        for field, kind in _FIELDS.items():
            value = getattr(self, field)
            if type(value) is not kind and not (value is None and field in _OPTIONAL):
                raise RegistrationError(f"{who}: {field} must be {kind.__name__}; got {value!r}")
        object.__setattr__(self, "requires", _names(who, "requires", self.requires))
        object.__setattr__(self, "composed_of", tuple(sorted(_names(who, "composed_of", self.composed_of))))
        if self.dtypes is not None:
            given: Any = self.dtypes
            given = given if isinstance(given, str) else map(str, given)
            dtypes = {name.removeprefix("torch.") for name in _names(who, "dtypes", given)}
            object.__setattr__(self, "dtypes", frozenset(dtypes))
            for name in sorted(dtypes):
                if not isinstance(getattr(torch, name, None), torch.dtype):
                    raise RegistrationError(f"{who}: dtypes names {name!r}, which is no dtype of torch")
        for target in filter(None, (self.forward, self.backward, self.unsupported, self.configs, self.aot)):
            module, _, attribute = target.partition(":")
            if not module or not attribute:
                raise RegistrationError(f"{who}: {target!r} is not of the form 'package.module:name'")
        if self.differentiable and self.backward is not None:
            raise RegistrationError(f"{who}: it is differentiable and names a backward; autograd needs but one way")

    def load(self) -> Callable[..., Any]:
        """The function that `forward` names; its module is imported."""
        return load(self.forward)  # type: ignore[no-any-return]


#: Types of a kernel's fields: whatever a plug-in gives is checked where it is made.
_FIELDS = {
    **dict.fromkeys(("op", "forward", "backward", "unsupported", "configs", "aot"), str),
    **dict.fromkeys(("differentiable", "deterministic", "traceable"), bool),
    "priority": int,
}
_OPTIONAL = ("backward", "unsupported", "configs", "aot")


def _names(who: str, field: str, names: object) -> frozenset[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise RegistrationError(f"{who}: {field} must be a set of names; got {names!r}: put it in braces")
    found = frozenset(names)
    if not all(isinstance(name, str) for name in found):
        raise RegistrationError(f"{who}: {field} must hold names alone; got {set(found)!r}")
    return found


class Backend:
    """A vendor's package: finds devices, tells their capabilities, offers kernels. Backends derive from it.

    Attributes:
        name: short and unique, for instance `nvidia`; what `use("nvidia")` and `KPT_USE=nvidia` name.
        device_types: torch's types of its devices: `("cuda",)`, `("xla", "tpu")`.
        tuning: the folder of the tuning tables that the package ships, as in `"kpt_backend_x:tuning"`.
        chips: what `python -m kpt_conformance.aot` compiles its kernels for.

    None of the methods may import a compiler or a framework other than torch at package import.
    """

    name: str
    device_types: tuple[str, ...]
    tuning: str | None = None
    chips: tuple[str, ...] = ()

    def unavailable(self) -> str | None:
        """None if the backend can run here, else the sentence that `kpt doctor` prints."""
        return None

    def capabilities(self, device: torch.device) -> frozenset[Capability]:
        """What `device`, which is of one of this backend's types, can do."""
        return frozenset()

    def kernels(self) -> Iterable[Kernel]:
        """Every kernel offered, whether or not it can run here."""
        return ()

    def device_name(self, device: torch.device) -> str:
        """The name of a device's model, which tuning tables and locks go by."""
        tell = getattr(getattr(torch, device.type, None), "get_device_name", None)
        return str(tell(device)) if tell is not None else device.type

    def synchronize(self, device: torch.device) -> None:
        """Wait for what a device was asked to do; a CPU has done it, with an accelerator beside it or without."""
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def reference_is_slow(self, device: torch.device) -> bool:
        """Whether users want to know that no kernel serves a call on a device."""
        return device.type not in ("cpu", "meta")

    def library(self) -> Mapping[str, str]:
        """Return what runs beside Python, for reports of runs: `isa`, the instruction set, and `compiler`."""
        return {}

    def serves(self, device_type: str) -> bool:
        """Whether it is for devices of a type."""
        return not self.device_types or device_type in self.device_types


class TorchBackend(Backend):
    """Kernels in plain PyTorch that feature packages list beside their ops: after every vendor's, on any device.

    Args:
        kernels: those of the installed feature packages.
    """

    name = TORCH
    device_types = ()

    def __init__(self, kernels: Iterable[Kernel] = ()) -> None:
        self._kernels = tuple(kernels)

    def capabilities(self, device: torch.device) -> frozenset[Capability]:
        """`host_memory` where reading a tensor's values does not make the host wait for a device."""
        return frozenset({"host_memory"}) if device.type == "cpu" else frozenset()

    def kernels(self) -> tuple[Kernel, ...]:
        """Those of the installed feature packages."""
        return self._kernels


def identity(backend: str, kernel: Kernel) -> str:
    """What tells a kernel from all others: backend/op/function."""
    return f"{backend}/{kernel.op}/{kernel.forward}"


def load(target: str) -> Any:
    """Import `package.module:attribute`."""
    module, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value
