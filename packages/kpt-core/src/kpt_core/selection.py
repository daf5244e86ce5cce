"""Tell what was chosen for a call, and why everything else was not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Name of no backend and no kernel: the op's own body.
REFERENCE = "reference"


class Refusal:
    """Why a kernel does not take a call: a sentence that is put together when somebody reads it.

    Args:
        template: the sentence, with names in braces.
        values: of these names.

    Examples:
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
class Refused:
    """One kernel (or backend) that will not serve a call.

    Attributes:
        backend: name of the backend.
        kernel: the kernel's function, None if the backend as a whole is meant.
        why: the sentence, perhaps not put together yet.
        of_call: the kernel itself refused this call's arguments; else it is refused for the whole device and dtype.
    """

    backend: str
    kernel: str | None
    why: Refusal | str = field(compare=False)
    of_call: bool = field(default=False, compare=False)

    @property
    def reason(self) -> str:
        """The sentence."""
        return str(self.why)

    def __str__(self) -> str:
        return f"{self.backend}{f' ({self.kernel})' if self.kernel else ''}: {self.reason}"


@dataclass(slots=True)
class KernelCount:
    """How often a kernel served an op in this process.

    No lock guards the counts, so that they cost little: calls of threads at the same moment may count as one.

    Attributes:
        op: name of the op.
        backend: name of the kernel's backend, or `reference`.
        identity: backend/op/function, or `reference`.
        calls: forward calls that it answered, those of an op that another kernel calls included.
        failures: errors of its forward and backward that KPT contained; not those that were raised to the caller
            because strict mode or an explicit choice asked for it.
        quarantined: it is off, since it raised too often.
    """

    op: str
    backend: str
    identity: str
    calls: int = 0
    failures: int = 0
    quarantined: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome of dispatch for one call.

    Attributes:
        op: name of the op.
        device: device of the call's first tensor.
        backend: the winner's backend, or `reference`.
        kernel: the winner's function (`package.module:function`), or `reference`.
        refusals: every kernel that was tried or ruled out before the winner, in order.
        children: selections of the ops that the winner calls in turn.
        tuned: the winner comes first for such calls because of a tuning table, and not by its priority.
        config: the winner's tuned configuration, None for its default.
        dtype: of the call's first tensor, as in `bfloat16`; it and the key describe the call, not the choice, and are
            left out of comparisons.
        key: the call's size key, see `kpt_core.op`.
    """

    op: str
    device: str
    backend: str
    kernel: str
    refusals: tuple[Refused, ...] = ()
    children: tuple["Selection", ...] = field(default=())
    tuned: bool = False
    config: Mapping[str, Any] | None = field(default=None, hash=False)
    dtype: str = field(default="", compare=False)
    key: tuple[int | str, ...] = field(default=(), compare=False)

    @property
    def identity(self) -> str:
        """Backend/op/function, or `reference`."""
        return REFERENCE if self.kernel == REFERENCE else f"{self.backend}/{self.op}/{self.kernel}"

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "op": self.op,
            "device": self.device,
            "backend": self.backend,
            "kernel": self.kernel,
            "refusals": [{"backend": r.backend, "kernel": r.kernel, "reason": r.reason} for r in self.refusals],
            "children": [child.as_dict() for child in self.children],
            "tuned": self.tuned,
            "config": None if self.config is None else dict(self.config),
            "dtype": self.dtype,
            "key": list(self.key),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines(""))

    def _lines(self, indent: str) -> list[str]:
        config = "".join(f", {name}={value!r}" for name, value in (self.config or {}).items())
        tuned = f" (tuned{config})" if self.tuned else ""
        lines = [f"{indent}{self.op} on {self.device} -> {self.kernel}{tuned}"]
        lines += [f"{indent}  not {refusal}" for refusal in self.refusals]
        for child in self.children:
            lines += child._lines(indent + "  ")
        return lines
