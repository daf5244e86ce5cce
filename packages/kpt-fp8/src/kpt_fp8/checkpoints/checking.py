"""What is wrong with a checkpoint, a sentence each: `check_checkpoint`."""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kpt_core import InputError
from kpt_fp8.conversion import Progress

from .contents import Contents, StoredWeight, describe
from .folder import CheckpointFolder, TensorReader
from .scheme import Scheme
from .soundness import faults_of


@dataclass(frozen=True, slots=True)
class CheckpointExamination:
    """What a checkpoint holds, and what is wrong with it.

    Attributes:
        path: of the folder.
        format: name of the format; None where the folder says of no weight that it is quantised.
        scheme: how weights are quantised, in words; likewise.
        weights: how many are 8-bit.
        others: how many tensors are not.
        faults: a sentence for each, which ends with what to do.
    """

    path: Path
    format: str | None
    scheme: str | None
    weights: int
    others: int
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.format is None:
            said = f"{self.path} is no FP8 checkpoint: none of its {self.others} tensors is declared 8-bit."
            return said if self.faults else f"{said} convert_checkpoint (`kpt convert`) quantises it."
        held = f"{self.weights} weights are 8-bit, {self.others} tensors stay as they are"
        return f"{self.path} is {self.format}: {self.scheme or 'in no way that can be read'}; {held}"

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**asdict(self), "path": str(self.path)}


def check_checkpoint(path: str | os.PathLike[str], *, progress: Progress | None = None) -> list[str]:
    """Return the faults that `examine_checkpoint` finds, and a sentence where nothing is quantised.

    Args:
        path: as in `examine_checkpoint`.
        progress: likewise.

    Returns:
        A sentence for each fault; none where all is well.

    Raises:
        InputError: no such folder, or it holds no checkpoint.
    """
    found = examine_checkpoint(path, progress=progress)
    if not found.faults and found.format is None:
        return [f"{found.path} is not quantised: nothing of it is 8-bit"]
    return found.faults


def examine_checkpoint(path: str | os.PathLike[str], *, progress: Progress | None = None) -> CheckpointExamination:
    """Look for what makes a checkpoint unreadable or wrong; all its quantised weights are read, one at a time.

    Found are files that are missing or truncated, an index that does not fit them, scales that are missing, have
    another name or shape, or belong to no 8-bit weight, weights that the configuration names otherwise, several schemes
    at once, codes that are NaN, scales that are no positive numbers, and scales that are stored as their reciprocals.

    Args:
        path: a folder with config.json and weights in safetensors.
        progress: called before each weight with the number done, of all, and its name.

    Returns:
        What it holds; without faults where all is well. A folder whose weights are not quantised has none.

    Raises:
        InputError: no such folder, or it holds no checkpoint.
    """
    folder = CheckpointFolder(path)
    contents = describe(folder)
    found = CheckpointExamination(
        folder.path,
        None if contents.format is None else contents.format.name,
        None if contents.scheme is None else str(contents.scheme),
        len(contents.weights),
        len(contents.plain),
        list(contents.faults),
    )
    if contents.scheme is None:
        return found
    with folder.reading() as reader:
        for done, weight in enumerate(contents.weights.values()):
            if progress is not None:
                progress(done, len(contents.weights), weight.name)
            found.faults.extend(_faults(contents, contents.scheme, weight, reader))
    return found


def _faults(contents: Contents, scheme: Scheme, stored: StoredWeight, reader: TensorReader) -> list[str]:
    try:
        return faults_of(stored.name, stored.read(reader, scheme), stored.scale, stored.input_scale)
    except InputError as error:
        return [str(error)]
