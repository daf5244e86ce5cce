"""What the options of `kpt optimize` accept, checked before anything heavy is imported."""

import difflib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kpt_cli.completion import DEVICE_TYPES
from kpt_cli.errors import CliError

if TYPE_CHECKING:
    import torch

LEVELS = ("conservative", "balanced", "aggressive")
OBJECTIVES = ("latency", "memory")
#: `auto` is the dtype that the model's config names.
DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_choice(kind: str, given: str, known: Sequence[str]) -> None:
    """Refuse a name that is not known, and offer the nearest.

    Raises:
        CliError: the name is not known.
    """
    if given in known:
        return
    near = difflib.get_close_matches(given, known, n=2, cutoff=0.5)
    offer = f"did you mean {' or '.join(near)}? (" if near else "("
    raise CliError(f"unknown {kind} {given!r}: {offer}known: {', '.join(known)})")


def check_max_error(max_error: float | None) -> None:
    """Refuse a budget that no error can be compared with.

    Raises:
        CliError: it is negative or no number.
    """
    if max_error is not None and not (max_error >= 0 and math.isfinite(max_error)):
        raise CliError(
            f"--max-error {max_error:g}: expected a relative error of 0 or more, for instance 1e-3; "
            "leave it out for the level's own budget"
        )


def check_environment(device: str) -> None:
    """Read the `KPT_*` variables as every op will, so that a slip in them is found before a model is loaded.

    Raises:
        UnknownNameError: `KPT_USE` names something that is not installed.
        InputError: a variable is malformed.
    """
    import kpt_core
    from kpt_cli.offers import serving

    for op in kpt_core.ops().values():
        serving(op, device, "float32")


def check_device(given: str | None) -> "torch.device":
    """The device that was named, or the first accelerator, or the CPU.

    Raises:
        CliError: this machine has no such device.
    """
    import torch

    from kpt_cli.devices import present

    devices = present().devices
    known = [device.device for device in devices]
    if given is None:
        return torch.device(next((device.device for device in devices if device.type != "cpu"), "cpu"))
    first = next((device.device for device in devices if given in (device.device, device.type)), None)
    if first is None:
        kind = given.partition(":")[0]
        what = f"no {given} is usable here" if kind in DEVICE_TYPES else f"unknown device {given!r}"
        raise CliError(f"{what}: this machine has {', '.join(known)} (`kpt doctor` says what it found)")
    return torch.device(first)
