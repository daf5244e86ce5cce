"""Which kernels may serve an op on a device: everything about a choice that does not depend on the call's arguments."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import _registry
from ._errors import KptError, UnknownNameError
from ._kernel import Backend, Kernel, compare_signatures, load
from ._selection import REFERENCE, Refusal
from ._settings import Scope, environment

if TYPE_CHECKING:
    from ._tuning import Tuned
    from ._tuning_files import Key

CallSignature = tuple[Any, ...]
Unsupported = Callable[..., str | None]
#: The end of a key of calls that need a gradient.
GRADIENT = "gradient"


def call_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSignature:
    """What identifies a call for quarantine: shapes, dtypes, devices and plain values."""

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (tuple(value.shape), value.dtype, value.device, value.requires_grad)
        if isinstance(value, list | tuple):
            return tuple(map(describe, value))
        return repr(value)

    return (*map(describe, args), *((name, describe(value)) for name, value in sorted(kwargs.items())))


def needs_gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autograd will ask for a gradient of a call."""
    return torch.is_grad_enabled() and any(map(_requires_grad, (*args, *kwargs.values())))


def _requires_grad(value: Any) -> bool:
    # Not by torch.utils._pytree: Dynamo fails in it where a value is a module's attribute.
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        value = tuple(value.values())
    return isinstance(value, list | tuple) and any(map(_requires_grad, value))


def call_key(size_key: "Callable[..., Key] | None", args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Key":
    """What identifies a call for tuning: its sizes, roughly, and whether a gradient is needed."""
    sizes = () if size_key is None else size_key(*args, **kwargs)
    return (*sizes, GRADIENT) if needs_gradient(args, kwargs) else tuple(sizes)


@dataclass(eq=False, slots=True)
class Candidate:
    """A kernel whose needs the device meets."""

    backend: str
    kernel: Kernel
    call: Callable[..., Any]
    unsupported: Unsupported | None
    quarantined: dict[CallSignature, str] = field(default_factory=dict)

    @property
    def unconditional(self) -> bool:
        """True if the kernel takes every call on its device and dtype."""
        return self.unsupported is None and not self.kernel.forward_only and not self.quarantined

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why this call is not for this kernel, or None."""
        if self.kernel.forward_only and needs_gradient(args, kwargs):
            return "forward only, and a gradient is needed"
        if self.unsupported is not None:
            reason = self.unsupported(*args, **kwargs)
            if reason is not None:
                return reason
        if self.quarantined:
            if torch.compiler.is_compiling():
                # Shapes may be symbols here.
                return "quarantined for some signature; compiled code leaves it out for all"
            failure = self.quarantined.get(call_signature(args, kwargs))
            if failure is not None:
                return f"quarantined for this signature: it raised {failure}"
        return None


@dataclass(frozen=True, slots=True)
class Candidates:
    """The kernels that may serve an op on a device and dtype, best first, and why the others may not.

    Attributes:
        reference: whether the reference may run if no kernel accepts the call.
        explicit: the choice (`use`, `KPT_USE`) that limits the kernels, None for automatic selection.
        tuned: what was measured for such calls, None if nothing was or there is nothing to choose from.
    """

    accepted: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]
    reference: bool
    explicit: str | None
    tuned: "Tuned | None" = None


def find_candidates(
    op: str,
    reference: Callable[..., Any],
    composite: bool,
    device: torch.device,
    dtype: torch.dtype,
    scope: Scope,
    loaded: dict[tuple[str, Kernel], Candidate],
) -> Candidates:
    """Sort the kernels offered for an op into accepted and refused.

    Args:
        op: name of the op.
        reference: the op's own body, whose signature kernels must have.
        composite: whether the reference calls other ops, so that a backend may serve those instead.
        device: device of the first tensor.
        dtype: dtype of the first tensor.
        scope: settings in force.
        loaded: candidates made before, by backend and kernel; what is quarantined must survive a change of scope.
    """
    for named, _ in scope.choices:
        if named != "*":
            _registry.get_op(named)
    _registry.warn_of_unknown(environment().disabled)
    asked_of, choice = scope.choice(op)
    if choice is not None and choice not in _registry.known_choices():
        raise UnknownNameError("backend or kernel", choice, _registry.known_choices(), "(asked for by use or KPT_USE)")
    offers = _registry.kernels(op)
    limited = asked_of == op
    if choice is not None and ":" in choice and not limited and not any(k.target == choice for _, k in offers):
        choice = None  # a kernel of another op: this one is chosen automatically
    accepted, refusals = [], []
    for backend, kernel in offers:
        reason = (
            None if choice in (None, backend.name, kernel.target) else f"{choice} was asked for (use or KPT_USE)"
        ) or _static_refusal(backend, kernel, device, dtype, scope)
        if reason is None:
            try:
                candidate = loaded.get((backend.name, kernel)) or _load(reference, backend, kernel)
            except KptError:
                raise
            except Exception as error:
                reason = f"could not be loaded: {type(error).__name__}: {error}"
                _registry.report(f"kernel {kernel.target}", reason)
            else:
                loaded[backend.name, kernel] = candidate
                accepted.append(candidate)
                continue
        refusals.append(Refusal(backend.name, kernel.target, reason))
    if not offers and device.type != "meta" and not _registry.serves(device.type):
        refusals.append(Refusal(f"{device.type} backend", None, "none is installed"))
    # Asked of all ops, it may serve the inner ones; asked of this op, it must serve this one.
    chosen_is_silent = (
        composite and not limited and not any(choice in (backend.name, kernel.target) for backend, kernel in offers)
    )
    return Candidates(
        accepted=tuple(accepted),
        refusals=tuple(refusals),
        reference=choice in (None, REFERENCE) or chosen_is_silent,
        explicit=choice,
    )


def _load(reference: Callable[..., Any], backend: Backend, kernel: Kernel) -> Candidate:
    call = load(kernel.target)
    compare_signatures(kernel.op, reference, kernel.target, call)
    unsupported = load(kernel.unsupported) if kernel.unsupported else None
    return Candidate(backend.name, kernel, call, unsupported)


def _static_refusal(
    backend: Backend, kernel: Kernel, device: torch.device, dtype: torch.dtype, scope: Scope
) -> str | None:
    if backend.name in scope.disabled or kernel.target in scope.disabled:
        return "disabled (KPT_DISABLE)"
    if backend.device_type != device.type:
        return f"runs on {backend.device_type}; this call is on {device.type}"
    try:
        unavailable = backend.unavailable()
        missing = () if unavailable else sorted(kernel.requires - backend.capabilities(device))
    except KptError:
        raise
    except Exception as error:
        return f"its backend failed to describe {device}: {type(error).__name__}: {error}"
    if unavailable:
        return unavailable
    if missing:
        return f"needs {', '.join(missing)}, which {device} lacks"
    name = str(dtype).removeprefix("torch.")
    if kernel.dtypes is not None and name not in kernel.dtypes:
        return f"dtype {name}; needs {' or '.join(sorted(kernel.dtypes))}"
    return None
