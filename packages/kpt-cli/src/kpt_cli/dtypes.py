"""The dtypes that `--dtype` takes where ops are run or looked at."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kpt_cli.optimize.choices import check_choice

if TYPE_CHECKING:
    import torch

KNOWN = ("float32", "bfloat16", "float16", "float64")


def dtypes_named(names: Iterable[str]) -> "list[torch.dtype]":
    """The dtypes of these names.

    Raises:
        CliError: a name is not known.
    """
    names = list(names)
    for name in names:
        check_choice("dtype", name, KNOWN)
    if not names:
        return []
    import torch

    return [getattr(torch, name) for name in names]
