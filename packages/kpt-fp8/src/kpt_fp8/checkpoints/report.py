"""What a conversion of a checkpoint did: `CheckpointReport`."""

from dataclasses import dataclass, field

from .scheme import Scheme


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """What became of a quantised weight.

    Attributes:
        name: of the weight in the model.
        exact: it stands for the same numbers as before, to the bit.
        how: what was done.
        sqnr: signal-to-noise ratio in dB against the numbers before; None where they are the same.
    """

    name: str
    exact: bool
    how: str
    sqnr: float | None = None


@dataclass(slots=True)
class CheckpointReport:
    """What a conversion of a checkpoint did.

    Attributes:
        source, target: names of the formats; `unquantised` where weights were not.
        scheme: how weights are quantised now.
        tensors: the quantised ones, in the order of the files.
        notes: what else changed, a sentence each.
        bytes: of all tensors now.
    """

    source: str
    target: str
    scheme: Scheme
    tensors: list[ConvertedTensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bytes: int = 0

    @property
    def exact(self) -> bool:
        """Whether every weight stands for the same numbers as before."""
        return all(each.exact for each in self.tensors)

    def __str__(self) -> str:
        exact = sum(each.exact for each in self.tensors)
        lines = [
            f"{self.source} -> {self.target}: {self.scheme}",
            f"{exact} of {len(self.tensors)} weights are bit-exact, {self.bytes} bytes in all",
        ]
        anew = sorted((each for each in self.tensors if not each.exact), key=lambda each: each.sqnr or 0.0)
        lines += [f"{each.name}  {each.how}  SQNR {each.sqnr:.1f} dB" for each in anew]
        return "\n".join([*lines, *self.notes])
