"""What was chosen for a call, and why everything else was not."""

from dataclasses import dataclass, field

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One kernel (or backend) that will not serve a call, and the reason as a sentence."""

    backend: str
    kernel: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}{f' ({self.kernel})' if self.kernel else ''}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome of dispatch for one call.

    Attributes:
        op: name of the op.
        device: device of the call's first tensor.
        backend: the winner's backend, or `reference`.
        kernel: the winner's full name (`package.module:attribute`), or `reference`.
        refusals: every kernel that was tried or ruled out before the winner, in order.
        children: selections of the ops that a composite reference calls in turn.
    """

    op: str
    device: str
    backend: str
    kernel: str
    refusals: tuple[Refusal, ...] = ()
    children: tuple["Selection", ...] = field(default=())

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "op": self.op,
            "device": self.device,
            "backend": self.backend,
            "kernel": self.kernel,
            "refusals": [{"backend": r.backend, "kernel": r.kernel, "reason": r.reason} for r in self.refusals],
            "children": [child.as_dict() for child in self.children],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines(""))

    def _lines(self, indent: str) -> list[str]:
        lines = [f"{indent}{self.op} on {self.device} -> {self.kernel}"]
        lines += [f"{indent}  not {refusal}" for refusal in self.refusals]
        for child in self.children:
            lines += child._lines(indent + "  ")
        return lines
