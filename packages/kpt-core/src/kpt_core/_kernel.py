"""A backend's side of the contract: what a kernel and a backend declare."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ._errors import SignatureError

Capability = str
"""A fact about a device: `bf16`, `fp8_e4m3fn`, `tma`, `wgmma`, `sm90`, `gfx942`, `avx512`..."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an op, named by strings so that registering it imports nothing.

    Args:
        op: name of the op, for instance `moe.grouped_mm`.
        target: where the callable lives, `package.module:attribute`. This is the kernel's full name.
        requires: capabilities that the device must have.
        priority: the higher one is tried first.
        dtypes: dtypes of the op's first tensor that are accepted, as in `"bfloat16"`; None accepts all.
        unsupported: `package.module:attribute` of a function with the op's arguments that returns None, or the
            sentence that refuses the call. What it raises propagates: a bug there must not look like a refusal.
        forward_only: the kernel gives no gradients and is refused when one is needed.
        deterministic: repeated calls give the same bits, gradients included; the conformance suite holds it to that.
        configs: `package.module:attribute` of what `kpt tune` tries, see `kpt_core.tuned_config`.
        aot: `package.module:attribute` of what is compiled ahead of time to prove the kernel on chips that are not
            there, see `kpt_conformance.aot`.
    """

    op: str
    target: str
    requires: Set[Capability] = frozenset()
    priority: int = 0
    dtypes: Set[str] | None = None
    unsupported: str | None = None
    forward_only: bool = False
    deterministic: bool = False
    configs: str | None = None
    aot: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "requires", frozenset(self.requires))
        if self.dtypes is not None:
            object.__setattr__(self, "dtypes", frozenset(str(d).removeprefix("torch.") for d in self.dtypes))
        for reference in filter(None, (self.target, self.unsupported, self.configs, self.aot)):
            module, _, attribute = reference.partition(":")
            if not module or not attribute:
                raise SignatureError(f"kernel for {self.op}: {reference!r} is not of the form 'package.module:name'")

    def load(self) -> Callable[..., Any]:
        """The callable that `target` names; its module is imported."""
        return load(self.target)  # type: ignore[no-any-return]

    def load_unsupported(self) -> Callable[..., str | None] | None:
        """The function that `unsupported` names, if any."""
        return load(self.unsupported) if self.unsupported else None


@runtime_checkable
class Backend(Protocol):
    """A vendor's package: finds devices, tells their capabilities, offers kernels.

    Attributes:
        name: short and unique, for instance `nvidia`; what `use("nvidia")` and `KPT_USE=nvidia` name.
        device_type: torch's device type: `cuda`, `xpu`, `xla`, `cpu`.

    Two more attributes are optional: `tuning`, the folder of the tables that the package ships, as in
    `"kpt_backend_x:tuning"` (read like those that `kpt tune` writes); and `chips: tuple[str, ...]`, the chips that
    `python -m kpt_conformance.aot` compiles its kernels for.

    None of the methods may import a compiler or a framework other than torch at package import.
    """

    name: str
    device_type: str

    def unavailable(self) -> str | None:
        """None if the backend can run here, else the sentence that `kpt doctor` prints."""

    def capabilities(self, device: torch.device) -> frozenset[Capability]:
        """What `device`, which is of this backend's `device_type`, can do."""

    def kernels(self) -> Iterable[Kernel]:
        """Every kernel offered, whether or not it can run here."""


def load(target: str) -> Any:
    """Import `package.module:attribute`."""
    module, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def signature_of(function: Callable[..., Any]) -> list[tuple[str, bool, Any]]:
    """Parameters as (name, keyword only, default); custom ops are read from their schema."""
    overload = getattr(function, "_opoverload", function)
    schema = getattr(overload, "_schema", None)
    if schema is not None:
        return [
            (a.name, bool(a.kwarg_only), a.default_value if a.has_default_value() else inspect.Parameter.empty)
            for a in schema.arguments
        ]
    return [
        (p.name, p.kind is inspect.Parameter.KEYWORD_ONLY, p.default)
        for p in inspect.signature(function).parameters.values()
    ]


def compare_signatures(op: str, reference: Callable[..., Any], target: str, kernel: Callable[..., Any]) -> None:
    """Raise `SignatureError` naming op and kernel unless both take the same parameters with the same defaults."""
    want, have = signature_of(reference), signature_of(kernel)
    if want == have:
        return

    def show(parameters: list[tuple[str, bool, Any]]) -> str:
        return ", ".join(
            f"{'*' if kw else ''}{name}{'' if default is inspect.Parameter.empty else f'={default!r}'}"
            for name, kw, default in parameters
        )

    raise SignatureError(f"kernel {target} takes ({show(have)}), but op {op} takes ({show(want)}); make them equal")
