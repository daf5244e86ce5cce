"""The kernels that serve an op on a device, and why the others won't."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .console import say
from .plugins import installed_version

if TYPE_CHECKING:
    from kpt_core import Kernel, Op

DTYPES = ("float32", "bfloat16")  #: of a model's activations, usually


@dataclass(frozen=True, slots=True)
class Accepted:
    """A kernel that may run."""

    backend: str
    kernel: str
    priority: int
    conditional: bool  # it has no backward, or looks at each call before it takes it


@dataclass(frozen=True, slots=True)
class Refused:
    """A kernel that will not run (None: the backend as a whole), and the sentence that says why."""

    backend: str
    kernel: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The kernels that serve calls of one op whose first tensor has this device and dtype."""

    op: str  # name of the op
    device: str  # as torch spells it
    dtype: str  # without `torch.`
    accepted: tuple[Accepted, ...] = ()  # kernels that may run, best first
    refused: tuple[Refused, ...] = ()  # the others
    reference: bool = False  # whether the reference runs where no kernel takes a call
    explicit: str | None = None  # the choice in force (`KPT_USE`), None if it is automatic
    tuned: int = 0  # for how many sizes `kpt tune` has measured what comes first
    #: of kernels that would run here and can't be loaded, what they raised; calls go on without them
    broken: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[Accepted, ...]:
        """Return the kernels that can be reached: none comes after one that takes every call."""
        last = next((n for n, accepted in enumerate(self.accepted, 1) if not accepted.conditional), None)
        return self.accepted[:last]

    @property
    def ends_in_reference(self) -> bool:
        """Tell if some call may reach the reference."""
        return self.reference and all(accepted.conditional for accepted in self.accepted)

    def sentence(self, backend: str, kernel: str) -> str:
        """Say what becomes of one kernel here."""
        for accepted in self.accepted:
            if (accepted.backend, accepted.kernel) == (backend, kernel):
                return "accepted where it takes the call" if accepted.conditional else "accepted"
        reasons = (each.reason for each in self.refused if (each.backend, each.kernel) == (backend, kernel))
        return next(reasons, "not offered here")

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            **asdict(self),
            "runs": [accepted.kernel for accepted in self.runs] + ["reference"] * self.ends_in_reference,
        }


def serving(op: "Op[..., Any]", device: str, dtype: str) -> Serving:
    """Select statically: kernels are loaded, and nothing is computed. Malformed `KPT_*` variables raise `KptError`."""
    import torch

    found = op.candidates(torch.device(device), getattr(torch, dtype))
    faults = {candidate: fault for candidate in found.accepted if (fault := _fault(op, candidate.kernel)) is not None}
    accepted, refused = [], [Refused(each.backend, each.kernel, each.reason) for each in found.refusals]
    for candidate in found.accepted:
        kernel = candidate.kernel
        if candidate in faults:
            refused.append(Refused(candidate.backend, kernel.forward, faults[candidate]))
        else:
            trains = kernel.backward is not None or kernel.differentiable
            conditional = not trains or kernel.unsupported is not None
            accepted.append(Accepted(candidate.backend, kernel.forward, kernel.priority, conditional))
    return Serving(
        op=op.name,
        device=device,
        dtype=dtype,
        accepted=tuple(accepted),
        refused=tuple(refused),
        reference=found.reference,
        explicit=found.explicit,
        tuned=0 if found.tuned is None else len(found.tuned.entries),
        broken=tuple(f"kernel {candidate.identity}: {fault}" for candidate, fault in faults.items()),
    )


def _fault(op: "Op[..., Any]", kernel: "Kernel") -> str | None:
    """Say why a kernel's functions can't be called; None if they can."""
    from kpt_core.contract import load

    # A record; for backward also what was saved, and a gradient for each result.
    arguments = {kernel.forward: 1, kernel.unsupported: 1, kernel.backward: 2 + op.result_count}
    try:
        for target, count in arguments.items():
            if target is not None:
                inspect.signature(load(target)).bind(*[None] * count)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code, which may even end the process
        return f"could not be loaded: {type(error).__name__}: {error}"
    return None


def missing_party(device_types: Sequence[str], unavailable: str | None) -> str | None:
    """Return the distribution whose absence makes a backend for host memory an option of no interest here, or None.

    Another backend serves host memory without it. One for an accelerator is not optional where the accelerator is.
    """
    named = re.match(r"([\w.-]+) is not installed\b", unavailable or "")
    if named is None or tuple(device_types) != ("cpu",) or installed_version(named[1]) is not None:
        return None
    return re.sub(r"[-_.]+", "-", named[1]).lower()  # as distributions are compared


def say_optional(absent: Mapping[str, Sequence[str]]) -> None:
    """Print, in a dim line, what is optional and not installed: distributions, each with the backends that need it."""
    if absent:
        told = (
            f"{name} (for {', '.join(f'backend {each}' for each in wanted)})" if wanted else name
            for name, wanted in absent.items()
        )
        say(f"Optional and not installed: {', '.join(told)}", style="dim")


def function_of(identity: str) -> str:
    """Return the function in backend/op/function, by which `use` and `KPT_USE` know a kernel too."""
    return identity.rpartition("/")[2]


def summary(op: "Op[..., Any]") -> str:
    """Return the first line of an op's docstring."""
    return (inspect.getdoc(op.reference) or "").partition("\n")[0]


def with_config(kernel: str, config: Mapping[str, Any] | None) -> str:
    """Return a kernel and its configuration for a cell of a table, a line for each value."""
    return kernel + "".join(f"\n{name}={value}" for name, value in (config or {}).items())
