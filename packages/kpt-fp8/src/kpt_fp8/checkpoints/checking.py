"""What is wrong with a checkpoint, a sentence each: `check_checkpoint`."""

import math
import os

import torch

from kpt_core import InputError
from kpt_fp8.conversion import Progress

from .changing import require_sound
from .contents import Contents, StoredWeight, describe
from .folder import CheckpointFolder, TensorReader
from .scheme import QuantizedWeight, Scheme

#: Weights of trained layers are far below this; scales that are reciprocals make them far larger.
_LARGE = 64.0


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
        weight = stored.read(reader, scheme)
        require_sound(stored.name, weight)
    except InputError as error:
        return [str(error)]
    given = weight.input_scale
    return [*_reciprocal(stored, weight), *_odd_input_scale(stored, None if given is None else float(given))]


def _reciprocal(stored: StoredWeight, weight: QuantizedWeight) -> list[str]:
    """Tell whether weights would be usual if the scale were 1 by what is stored."""
    if weight.codes.numel() == 0:
        return []
    largest = _largest(weight)
    inverse = QuantizedWeight(weight.codes, 1 / weight.scale, weight.granularity)
    usual = _largest(inverse)
    # By codes alone the largest is 448, so that a scale of 1 tells nothing: both must be clearly apart.
    if largest <= _LARGE or not math.isfinite(usual) or usual > _LARGE or largest < 100 * usual:
        return []
    return [
        f"{stored.scale} looks like the reciprocal of a scale: weights of up to {largest:.3g} with it, and {usual:.3g} "
        "with 1 by it; readers multiply by it, whatever its name says, so store the reciprocal"
    ]


def _largest(weight: QuantizedWeight) -> float:
    return float(weight.dequantize().abs().amax().to(torch.float64))


def _odd_input_scale(stored: StoredWeight, scale: float | None) -> list[str]:
    # Activations of up to 448 times the scale are told apart.
    if scale is None or 1e-8 <= scale <= 1e4:
        return []
    return [
        f"{stored.input_scale} is {scale:.3g}, for activations of up to {448 * scale:.3g}: calibrate again, or store "
        "its reciprocal, if it is one"
    ]
