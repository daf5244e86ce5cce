"""What is wrong with a checkpoint, a sentence each: `check_checkpoint`."""

import os

from kpt_core import InputError
from kpt_fp8.conversion import Progress

from .contents import Contents, StoredWeight, describe
from .folder import CheckpointFolder, TensorReader
from .scheme import Scheme
from .soundness import faults_of


def check_checkpoint(path: str | os.PathLike[str], *, progress: Progress | None = None) -> list[str]:
    """Look for what makes a checkpoint unreadable or wrong; all its quantised weights are read, one at a time.

    Found are files that are missing or truncated, an index that does not fit them, scales that are missing, have
    another name or shape, or belong to no 8-bit weight, weights that the configuration names otherwise, several schemes
    at once, codes that are NaN, scales that are no positive numbers, and scales that are stored as their reciprocals.

    Args:
        path: a folder with config.json and weights in safetensors.
        progress: called before each weight with the number done, of all, and its name.

    Returns:
        A sentence for each fault; none where all is well.

    Raises:
        InputError: no such folder, or it holds no checkpoint.
    """
    folder = CheckpointFolder(path)
    contents = describe(folder)
    found = list(contents.faults)
    if contents.scheme is None:
        if not found and contents.format is None:
            found.append(f"{folder.path} is not quantised: nothing of it is 8-bit")
        return found
    with folder.reading() as reader:
        for done, weight in enumerate(contents.weights.values()):
            if progress is not None:
                progress(done, len(contents.weights), weight.name)
            found.extend(_faults(contents, contents.scheme, weight, reader))
    return found


def _faults(contents: Contents, scheme: Scheme, stored: StoredWeight, reader: TensorReader) -> list[str]:
    try:
        return faults_of(stored.name, stored.read(reader, scheme), stored.scale, stored.input_scale)
    except InputError as error:
        return [str(error)]
