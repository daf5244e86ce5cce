"""Choose: the kernels that may serve an op on a device, and the one that takes a call."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kpt_core import registry
from kpt_core.contract import TORCH, Backend, Call, Kernel, Op, identity, load
from kpt_core.errors import KptError, RegistrationError, UnknownNameError, describe_error
from kpt_core.policy import GRADIENT, Choice, Tuned
from kpt_core.selection import REFERENCE, KernelCount, Refusal, Refused, Selection

from .settings import Scope, effective, warn_of_unknown

_NOT_LOADED = "not loaded yet"
_FORWARD_ONLY = "forward only, and a gradient is needed"
#: After so many failures a kernel is off for the process.
MOST_FAILURES = 3


class Candidate:
    """A kernel whose needs the device meets; its functions are imported when it is first asked.

    Attributes:
        backend: name of its backend.
        kernel: the kernel.
        identity: backend/op/function.
        saves: whether its forward gives what is saved beside the results.
        free: whether it takes every call; False while it is not loaded.
        forward: its function, once `refusal` was asked; as `backward` is.
        prepare: its function that prepares calls, None if it has none; once `refusal` was asked.
        count: how often it served and failed in this process, which `forget` keeps.
        failures: what it raised.
        agrees: whether its results were seen to be what the contract says, without and with gradients wanted.
    """

    __slots__ = (
        "_broken", "_results", "_unsupported",
        "agrees", "backend", "backward", "count", "failures", "forward", "free", "identity", "kernel", "prepare",
        "saves",
    )  # fmt: skip

    forward: Callable[[Call], Any]
    backward: Callable[..., dict[str, Any]]

    def __init__(self, op: Op[..., Any], backend: str, kernel: Kernel) -> None:
        self.backend, self.kernel, self.identity = backend, kernel, identity(backend, kernel)
        self.saves = kernel.backward is not None and op.saved_count > 0
        self.count: KernelCount = op.counts.setdefault(self.identity, KernelCount(op.name, backend, self.identity))
        self.failures: list[str] = []
        self.free = False
        self.agrees: set[bool] = set()
        self.prepare: Callable[[Call], Callable[..., Any] | None] | None = None
        self._broken: str | None = _NOT_LOADED
        self._unsupported: Callable[[Call], Refusal | str | None] | None = None
        self._results = op.result_count

    def refusal(self, call: Call) -> Refusal | str | None:
        """Return why this call is not for this kernel, or None."""
        if self._broken is not None:
            if self._broken is _NOT_LOADED:
                self._load()
            if self._broken is not None:
                return self._broken
        kernel = self.kernel
        if call.needs and kernel.backward is None and not kernel.differentiable:
            return _FORWARD_ONLY
        if self._unsupported is not None:
            refused = self._unsupported(call)
            if refused is not None:
                if not isinstance(refused, Refusal | str):
                    raise RegistrationError(
                        f"{self.kernel.unsupported} gave {refused!r}; expected None, a sentence or a Refusal"
                    )
                return refused
        if len(self.failures) >= MOST_FAILURES:
            return Refusal(
                "quarantined: it raised {count} times, lastly {last}", count=len(self.failures), last=self.failures[-1]
            )
        return None

    @property
    def traceable(self) -> bool:
        """Return whether compilers may look into it and into what refuses calls, if gradients are no question."""
        if self._broken is _NOT_LOADED:
            self._load()
        return self.kernel.traceable and not (self._broken or self.failures)

    @property
    def unsupported(self) -> Callable[[Call], Refusal | str | None] | None:
        """Return the kernel's own function that refuses calls."""
        return self._unsupported

    def note(self, error: Exception) -> None:
        """Note that it raised."""
        self.free = False
        self.failures.append(describe_error(error))
        self.count.failures += 1

    def take_back(self, error: Exception) -> None:
        """Forget what it raised: the call was wrong."""
        if describe_error(error) in self.failures:
            self.failures.remove(describe_error(error))
            self.count.failures -= 1

    def _load(self) -> None:
        """Import the functions; what can't be imported refuses, and costs a warning."""
        kernel = self.kernel
        try:
            self.forward = _function(kernel.forward, 1)  # the record
            if kernel.unsupported is not None:
                self._unsupported = _function(kernel.unsupported, 1)
            if kernel.prepare is not None:
                self.prepare = _function(kernel.prepare, 1)
            if kernel.backward is not None:
                self.backward = _function(kernel.backward, 2 + self._results)  # record, saved and gradients
            self.free = kernel.unsupported is None and (kernel.backward is not None or kernel.differentiable)
            self._broken = None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._broken = f"could not be loaded: {describe_error(error)}"
            registry.report(f"kernel {self.identity}", self._broken)


def _function(target: str, arguments: int) -> Callable[..., Any]:
    """Import a function that takes so many arguments by position."""
    found = load(target)
    try:
        inspect.signature(found).bind(*[None] * arguments)
    except TypeError as error:  # no function at all is one too
        raise RegistrationError(f"{target} must take {arguments} argument{'s' * (arguments > 1)}: {error}") from None
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The kernels that may serve an op on a device and dtype, best first, and why the others may not.

    Attributes:
        device: of such calls' first tensors.
        dtype: likewise.
        accepted: the kernels.
        refusals: of the others.
        reference: whether the reference may run if no kernel accepts the call.
        explicit: the choice (`use`, `KPT_USE`) that limits the kernels, None for automatic selection.
        tuned: what was measured for such calls, None if nothing was or there is nothing to choose from.
    """

    device: torch.device
    dtype: torch.dtype
    accepted: tuple[Candidate, ...]
    refusals: tuple[Refused, ...]
    reference: bool
    explicit: str | None
    tuned: Tuned | None = None

    def without(self, candidate: Candidate, error: Exception) -> "Candidates":
        """Return them for a call in which one has raised."""
        refused = Refused(
            candidate.backend, candidate.kernel.forward, f"it raised {describe_error(error)}", of_call=True
        )
        rest = tuple(each for each in self.accepted if each is not candidate)
        return replace(self, accepted=rest, refusals=(*self.refusals, refused))


def candidate_of(op: Op[..., Any], backend: str, kernel: Kernel) -> Candidate:
    """Return the state of a kernel, which is one in all scopes and on all devices."""
    found: Candidate = op.kernels.setdefault((backend, kernel), Candidate(op, backend, kernel))
    return found


def candidates_of(op: Op[..., Any], device: torch.device, dtype: torch.dtype) -> Candidates:
    """Return the kernels that may serve calls on a device with a first tensor of `dtype`, by the settings in force."""
    scope = effective()
    found: Candidates | None = op.found.get((device, dtype, scope))
    if found is None:
        registry.backends()  # once they are discovered, all is forgotten
        known = op.found
        found = known[device, dtype, scope] = find_candidates(op, device, dtype, scope)
    return found


def find_candidates(op: Op[..., Any], device: torch.device, dtype: torch.dtype, scope: Scope) -> Candidates:
    """Sort the kernels offered for an op into accepted and refused.

    Args:
        op: the op.
        device: device of the first tensor.
        dtype: dtype of the first tensor.
        scope: settings in force.

    Raises:
        UnknownNameError: what was asked for, or the op that it was asked for, does not exist.
    """
    forced = next((each for each in reversed(scope.forced) if each[0] == op.name), None)
    if forced is not None:
        return Candidates(device, dtype, (candidate_of(op, forced[1], forced[2]),), (), False, forced[2].forward)
    for named, _ in scope.choices:
        if named != "*":
            registry.get_op(named)
    warn_of_unknown()
    asked_of, choice = scope.choice(op.name)
    if choice is not None and choice not in registry.known_choices():
        raise UnknownNameError("backend or kernel", choice, registry.known_choices(), "(asked for by use or KPT_USE)")
    offers = registry.kernels(op.name)
    limited = asked_of == op.name
    own = [kernel for backend, kernel in offers if choice in _names(backend, kernel)]
    if choice is not None and ":" in choice and not limited and not own:
        choice = None  # a kernel of another op: this one is chosen automatically
    # Asked of all ops, a backend may serve those of which this one is composed; asked of this op, it must serve it.
    reference = choice in (None, REFERENCE) or (choice == TORCH and not own)  # which is plain PyTorch, too
    through_parts = choice not in (None, REFERENCE, TORCH) and not limited and not own
    accepted, refusals = [], []
    for backend, kernel in offers:
        asked = choice is None or choice in _names(backend, kernel)
        if through_parts:
            asked = backend.name == TORCH and bool(kernel.composed_of)
        reason = None if asked else f"{choice} was asked for (use or KPT_USE)"
        reason = reason or _static_refusal(op, backend, kernel, device, dtype, scope)
        if reason is None:
            accepted.append(candidate_of(op, backend.name, kernel))
        else:
            refusals.append(Refused(backend.name, kernel.forward, reason))
    if device.type != "meta" and not registry.serves(device.type):
        refusals.append(Refused(f"{device.type} backend", None, "none is installed"))
    tuned = _tuned(op.name, device, dtype, [each.identity for each in accepted]) if accepted else None
    return Candidates(device, dtype, tuple(accepted), tuple(refusals), reference, choice, tuned)


def _tuned(op: str, device: torch.device, dtype: torch.dtype, kernels: list[str]) -> Tuned | None:
    """Return what the first policy knows that knows anything."""
    for policy in registry.policies():
        try:
            found = policy(op, device, dtype, kernels)
        except (Exception, SystemExit) as error:  # a plug-in's mistake must not stop a call
            registry.report(f"policy {policy.__module__}", f"it raised {describe_error(error)}")
            continue
        if found is not None:
            return found
    return None


def _names(backend: Backend, kernel: Kernel) -> tuple[str, str, str]:
    return backend.name, kernel.forward, identity(backend.name, kernel)


def _static_refusal(
    op: Op[..., Any], backend: Backend, kernel: Kernel, device: torch.device, dtype: torch.dtype, scope: Scope
) -> str | None:
    if not scope.disabled.isdisjoint(_names(backend, kernel)):
        return "disabled (KPT_DISABLE)"
    if not registry.backend_serves(backend, device.type):
        return f"runs on {' and '.join(backend.device_types)}; this call is on {device.type}"
    try:
        unavailable = backend.unavailable()
        missing = () if unavailable else sorted(kernel.requires - backend.capabilities(device))
    except (Exception, SystemExit) as error:
        if isinstance(error, KptError) and scope.choice(op.name)[1] in _names(backend, kernel):
            raise
        return f"its backend failed to describe {device}: {describe_error(error)}"
    if unavailable:
        return unavailable
    if missing:
        return f"needs {', '.join(missing)}, which {device} lacks"
    name = str(dtype).removeprefix("torch.")
    if kernel.dtypes is not None and name not in kernel.dtypes:
        return f"dtype {name}; needs {' or '.join(sorted(kernel.dtypes))}"
    return None


def first_of(op: Op[..., Any], call: Call) -> Tensor:
    """Return the tensor that tells a call's device and dtype."""
    first: Tensor = getattr(call, next(iter(op.kinds)))  # by name: Dynamo takes an object's numbers for dynamic ones
    return first


def size_key(op: Op[..., Any], call: Call) -> tuple[int | str, ...]:
    """Return what identifies a call for tuning: its sizes, roughly, and whether a gradient is needed."""
    sizes = () if op.size_key is None else op.size_key(call)
    return (*sizes, GRADIENT) if call.needs else tuple(sizes)


def choose(op: Op[..., Any], call: Call, found: Candidates) -> tuple[Candidate | None, Choice | None, list[Refused]]:
    """Return the best candidate, None for the reference; what was measured, if that made the choice; the refusals."""
    refusals = list(found.refusals)
    accepted: Iterable[Candidate] = found.accepted
    key = () if found.tuned is None else size_key(op, call)
    entry = None if found.tuned is None else found.tuned.entries.get(key)
    if entry is not None:
        if entry.kernel == REFERENCE and found.explicit is None:
            return None, entry, refusals
        accepted = sorted(accepted, key=lambda candidate: candidate.identity != entry.kernel)
    for candidate in accepted:
        reason = candidate.refusal(call)
        if reason is None:
            tuned = None if found.tuned is None else found.tuned.configuring(key, candidate.identity)
            return candidate, tuned, refusals
        refusals.append(Refused(candidate.backend, candidate.kernel.forward, reason, of_call=True))
    return None, None, refusals


def selection_of(
    op: Op[..., Any],
    call: Call,
    candidate: Candidate | None,
    tuned: Choice | None,
    refusals: Iterable[Refused],
    children: Iterable[Selection],
) -> Selection:
    """Return what is told of a choice."""
    first = first_of(op, call)
    return Selection(
        op=op.name,
        device=str(first.device),
        backend=REFERENCE if candidate is None else candidate.backend,
        kernel=REFERENCE if candidate is None else candidate.kernel.forward,
        refusals=tuple(refusals),
        children=tuple(children),
        tuned=tuned is not None,
        config=None if tuned is None else tuned.config,
        dtype=str(first.dtype).removeprefix("torch."),
        key=size_key(op, call),
    )
