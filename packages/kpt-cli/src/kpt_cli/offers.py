"""What serves an op on a device: the kernels that are offered, the ones that will run, and why the others won't."""

import inspect
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kpt_core import Kernel, Op

#: What a model's activations usually are.
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A kernel that may run. `conditional`: it looks at each call before it takes it."""

    backend: str
    kernel: str
    priority: int
    conditional: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A kernel that will not run (None: the backend as a whole), and the sentence that says why."""

    backend: str
    kernel: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What serves calls of one op whose first tensor has this device and dtype.

    Attributes:
        op: name of the op.
        device: as torch spells it.
        dtype: without `torch.`.
        accepted: kernels that may run, best first.
        refused: the others.
        reference: whether the PyTorch reference runs where no kernel takes a call.
        explicit: the choice in force (`KPT_USE`), None if it is automatic.
        tuned: for how many sizes `kpt tune` has measured what comes first.
        modelled: for how many a shipped table has a model's choice of configuration, and nothing was measured.
        broken: the contradiction between op and kernel that makes every call fail, if there is one.
    """

    op: str
    device: str
    dtype: str
    accepted: tuple[Accepted, ...] = ()
    refused: tuple[Refused, ...] = ()
    reference: bool = False
    explicit: str | None = None
    tuned: int = 0
    modelled: int = 0
    broken: str | None = None

    @property
    def runs(self) -> tuple[Accepted, ...]:
        """The kernels that can be reached: none comes after one that takes every call."""
        last = next((n for n, accepted in enumerate(self.accepted, 1) if not accepted.conditional), None)
        return self.accepted[:last]

    @property
    def ends_in_reference(self) -> bool:
        """Whether some call may reach the reference."""
        return self.reference and all(accepted.conditional for accepted in self.accepted)

    def sentence(self, backend: str, kernel: str) -> str:
        """What becomes of one kernel here."""
        for accepted in self.accepted:
            if (accepted.backend, accepted.kernel) == (backend, kernel):
                return "accepted where it takes the call" if accepted.conditional else "accepted"
        reasons = [each.reason for each in self.refused if (each.backend, each.kernel) == (backend, kernel)]
        return reasons[0] if reasons else self.broken or "not offered here"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "runs": [accepted.kernel for accepted in self.runs] + ["reference"] * self.ends_in_reference,
        }


def serving(op: "Op[..., Any]", device: str, dtype: str) -> Serving:
    """Select statically: nothing is computed. What can't be loaded is refused, and told by `kpt_core.problems()`.

    Raises:
        UnknownNameError: `KPT_USE` names something that is not installed.
        InputError: a `KPT_*` variable is malformed.
    """
    import torch

    import kpt_core

    try:
        found = op.candidates(torch.device(device), getattr(torch, dtype))
    except (kpt_core.UnknownNameError, kpt_core.InputError):
        raise
    except kpt_core.KptError as error:  # a kernel whose signature is not the op's
        return Serving(op=op.name, device=device, dtype=dtype, broken=str(error))
    methods = [] if found.tuned is None else [entry.method for entry in found.tuned.entries.values()]
    return Serving(
        op=op.name,
        device=device,
        dtype=dtype,
        accepted=tuple(
            Accepted(
                backend=candidate.backend,
                kernel=candidate.kernel.target,
                priority=candidate.kernel.priority,
                conditional=not candidate.unconditional,
            )
            for candidate in found.accepted
        ),
        refused=tuple(Refused(backend=r.backend, kernel=r.kernel, reason=r.reason) for r in found.refusals),
        reference=found.reference,
        explicit=found.explicit,
        tuned=methods.count("measured"),
        modelled=methods.count("modelled"),
    )


def offered(op: str) -> list[tuple[str, "Kernel"]]:
    """Every kernel that a backend offers for an op, with the backend's name, best first."""
    import kpt_core

    found: list[tuple[str, Kernel]] = []
    for name, backend in kpt_core.backends().items():
        try:
            found += [(name, kernel) for kernel in backend.kernels() if kernel.op == op]
        except Exception:  # told by kpt_core.problems()
            continue
    return sorted(found, key=lambda offer: (-offer[1].priority, offer[0], offer[1].target))


def summary(op: "Op[..., Any]") -> str:
    """The first line of an op's docstring."""
    return (inspect.getdoc(op.reference) or "").partition("\n")[0]
