"""Ask others what they know of a choice: policies, found through the entry-point group `kpt.policies`.

A policy is a function `(op, device, dtype, kernels) -> Tuned | None`, where `kernels` are the identities of those that
may serve such calls, best first. `kpt_optimize` offers one that reads tuning tables.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Key = tuple[int | str, ...]
"""The key of a call: of its op's `size_key`, with `GRADIENT` at its end where the call needs one."""
GRADIENT = "gradient"


class Choice(Protocol):
    """Name the kernel that comes first for the calls of a key, and its configuration."""

    @property
    def kernel(self) -> str:
        """Identity of the kernel, or `reference`."""

    @property
    def config(self) -> dict[str, Any] | None:
        """Configuration of the kernel, None for its own default."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """Hold what is known of an op on a device, in a dtype.

    Attributes:
        entries: by the key of a call.
    """

    entries: Mapping[Key, Choice]

    def configuring(self, key: Key, kernel: str) -> Choice | None:
        """Return what configures a kernel for calls of a key; without it, of those that differ in gradients alone."""
        other = key[:-1] if key[-1:] == (GRADIENT,) else (*key, GRADIENT)
        entry = self.entries.get(key) or self.entries.get(other)
        return entry if entry is not None and entry.kernel == kernel else None


Policy = Callable[[str, torch.device, torch.dtype, Sequence[str]], Tuned | None]


def next_power_of_two(size: int) -> int:
    """Return the least power of two that is at least `size`, 1 for 0: for dimensions of a `size_key` that vary."""
    return 1 << max(size - 1, 0).bit_length()
