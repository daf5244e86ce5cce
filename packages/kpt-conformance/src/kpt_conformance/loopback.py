"""A backend that lives in this process: it exercises dispatch, and a kernel under test, with no hardware."""

import itertools
import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Self

import torch

import kpt_core
from kpt_core import Capability, Kernel

#: What kernels' names point into, since a kernel is named by a string: `kpt_conformance.loopback:offered.<name>`.
offered = SimpleNamespace()
_numbers = itertools.count(1)


class Loopback:
    """A backend (`kpt_core.Backend`) made of functions, whose every answer can be set, at any time.

    Kernels take part in dispatch inside a `with` block; what changes there is seen by the next call.

    Example:
        >>> with Loopback("mine") as loopback:
        ...     kernel = loopback.offer("moe.grouped_mm", function, priority=10)
        ...     kpt_core.explain("moe.grouped_mm", x, weight, offsets).kernel == kernel.target
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
        self.device_type = device_type
        self._capabilities = frozenset(capabilities)
        self._broken = broken
        self._kernels: tuple[Kernel, ...] = ()

    def __enter__(self) -> Self:
        kpt_core.add_backend(self)
        return self

    def __exit__(self, *error: object) -> None:
        kpt_core.remove_backend(self.name)

    @property
    def broken(self) -> str | None:
        """What `unavailable` gives."""
        return self._broken

    @broken.setter
    def broken(self, sentence: str | None) -> None:
        self._broken = sentence
        self._selected_anew()

    @property
    def ready(self) -> bool:
        """Whether the backend can run; setting it to True mends a broken one."""
        return self._broken is None

    @ready.setter
    def ready(self, ready: bool) -> None:
        self.broken = None if ready else f"{self.name} is not ready"

    def offer(
        self,
        op: str,
        function: Callable[..., Any],
        *,
        requires: Iterable[Capability] = (),
        priority: int = 0,
        dtypes: Iterable[str] | None = None,
        unsupported: Callable[..., str | None] | None = None,
        forward_only: bool = False,
        deterministic: bool = False,
        configs: Any = None,
    ) -> Kernel:
        """Offer a function as a kernel of an op.

        Args:
            op: name of the op.
            function: has the op's signature.
            requires: as in `kpt_core.Kernel`, like `priority`, `dtypes`, `forward_only` and `deterministic`.
            priority: the higher one is tried first.
            dtypes: of the op's first tensor; None accepts all.
            unsupported: a function of the op's arguments that gives None, or the sentence that refuses the call.
            forward_only: the function gives no gradients.
            deterministic: repeated calls give the same bits.
            configs: what tuning tries; None if there is nothing to tune.

        Returns:
            The kernel. Its target is unique in this process, whatever the name of the function.
        """
        kernel = Kernel(
            op,
            _publish(function),
            requires=frozenset(requires),
            priority=priority,
            dtypes=None if dtypes is None else frozenset(dtypes),
            unsupported=None if unsupported is None else _publish(unsupported),
            forward_only=forward_only,
            deterministic=deterministic,
            configs=None if configs is None else _publish(configs),
        )
        self._kernels += (kernel,)
        self._selected_anew()
        return kernel

    def unavailable(self) -> str | None:
        """As `broken` says."""
        return self._broken

    def capabilities(self, device: torch.device) -> frozenset[Capability]:
        """The same for every device."""
        return self._capabilities

    def kernels(self) -> tuple[Kernel, ...]:
        """Those offered so far."""
        return self._kernels

    def _selected_anew(self) -> None:
        """Have what was selected so far forgotten, as adding a backend does."""
        if kpt_core.backends().get(self.name) is self:
            kpt_core.remove_backend(self.name)
            kpt_core.add_backend(self)


def _publish(value: Any) -> str:
    """Give a value a name of its own that `Kernel` can hold."""
    name = f"{re.sub(r'[^0-9A-Za-z_]', '_', getattr(value, '__name__', type(value).__name__))}_{next(_numbers)}"
    setattr(offered, name, value)
    return f"{__name__}:offered.{name}"
