"""Which candidate takes a call."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kpt_core.contract import REFERENCE, Call
from kpt_core.policy import GRADIENT, Choice
from kpt_core.selection import Refused, Selection

from .candidates import Candidate, Candidates

if TYPE_CHECKING:
    from kpt_core.operation import Op


def first_of(op: "Op[..., Any]", call: Call) -> Tensor:
    """The tensor that tells a call's device and dtype."""
    first = getattr(call, next(iter(op.kinds)))
    return first if isinstance(first, Tensor) else first[0]


def size_key(op: "Op[..., Any]", call: Call) -> tuple[int | str, ...]:
    """What identifies a call for tuning: its sizes, roughly, and whether a gradient is needed."""
    sizes = () if op.size_key is None else op.size_key(call)
    return (*sizes, GRADIENT) if call.needs else tuple(sizes)


def choose(op: "Op[..., Any]", call: Call, found: Candidates) -> tuple[Candidate | None, Choice | None, list[Refused]]:
    """The best candidate, None for the reference; what was measured, if that made the choice; and the refusals."""
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
    op: "Op[..., Any]",
    call: Call,
    candidate: Candidate | None,
    tuned: Choice | None,
    refusals: Iterable[Refused],
    children: Iterable[Selection],
) -> Selection:
    """What is told of a choice."""
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
