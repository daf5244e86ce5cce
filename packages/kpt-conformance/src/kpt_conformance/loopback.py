"""A backend that lives in this process: it exercises dispatch, and a kernel under test, with no hardware."""

import itertools
import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Self

import torch

import kpt_core
from kpt_core import Backend, Capability, Kernel
from kpt_core.registry import add_backend, remove_backend

#: What kernels' names point into, since a kernel is named by a string: `kpt_conformance.loopback:offered.<name>`.
offered = SimpleNamespace()
_numbers = itertools.count(1)


class Loopback(Backend):
    """A backend made of functions, whose every answer can be set, at any time.

    Kernels take part in dispatch inside a `with` block; what changes there is seen by the next call.

    Examples:
        >>> with Loopback("mine") as loopback:
        ...     kernel = loopback.offer("moe.grouped_mm", forward, backward, priority=10)
        ...     kpt_core.explain("moe.grouped_mm", x, weight, offsets).kernel == kernel.forward
        True

    Args:
        name: the backend's name, unique among those that are there at the same time.
        device_type: of the devices that it serves.
        capabilities: what each of these devices can do.
        broken: why the backend can't run here, as a sentence; None if it can.
    """

    def __init__(
        self,
        name: str = "loopback",
        device_type: str = "cpu",
        capabilities: Iterable[Capability] = (),
        broken: str | None = None,
    ) -> None:
        self.name = name
        self.device_types = (device_type,)
        self._capabilities = frozenset(capabilities)
        self._broken = broken
        self._kernels: tuple[Kernel, ...] = ()

    def __enter__(self) -> Self:
        add_backend(self)
        return self

    def __exit__(self, *error: object) -> None:
        remove_backend(self.name)

    @property
    def broken(self) -> str | None:
        """Return what `unavailable` gives."""
        return self._broken

    @broken.setter
    def broken(self, sentence: str | None) -> None:
        self._broken = sentence
        self._selected_anew()

    @property
    def ready(self) -> bool:
        """Return whether the backend can run; setting it to True mends a broken one."""
        return self._broken is None

    @ready.setter
    def ready(self, ready: bool) -> None:
        self.broken = None if ready else f"{self.name} is not ready"

    def offer(
        self,
        op: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any] | None = None,
        *,
        unsupported: Callable[..., Any] | None = None,
        configs: Any = None,
        **declared: Any,
    ) -> Kernel:
        """Offer functions as a kernel of an op, and return the kernel.

        Arguments are those of `kpt_core.Kernel`, with functions in the place of their names. The kernel's name is
        unique in this process, whatever the name of the function.
        """
        functions = {"forward": forward, "backward": backward, "unsupported": unsupported, "configs": configs}
        declared |= {name: _publish(value) for name, value in functions.items() if value is not None}
        kernel = Kernel(op, **declared)
        self._kernels += (kernel,)
        self._selected_anew()
        return kernel

    def unavailable(self) -> str | None:
        """Return what `broken` says."""
        return self._broken

    def capabilities(self, device: torch.device) -> frozenset[Capability]:
        """Return the same for every device."""
        return self._capabilities

    def kernels(self) -> tuple[Kernel, ...]:
        """Return those offered so far."""
        return self._kernels

    def _selected_anew(self) -> None:
        # As adding a backend does, this has what was selected so far forgotten.
        if kpt_core.backends().get(self.name) is self:
            remove_backend(self.name)
            add_backend(self)


def _publish(value: Any) -> str:
    """Give a value a name of its own that `Kernel` can hold."""
    name = f"{re.sub(r'[^0-9A-Za-z_]', '_', getattr(value, '__name__', type(value).__name__))}_{next(_numbers)}"
    setattr(offered, name, value)
    return f"{__name__}:offered.{name}"
