"""A subject: one kernel, or a reference, on a device, and how it is chosen."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import kpt_core
from kpt_core import Call, Kernel, NoKernelError, Op
from kpt_core.contract import TORCH, identity, load
from kpt_core.dispatch import force
from kpt_core.selection import REFERENCE
from kpt_optimize.cases import Arguments, CaseTable

from .tensors import tensors_of


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tried.

    Attributes:
        op: the op.
        target: the kernel's function (`package.module:function`), or `reference`; for a composite also the backend.
        backend: name of the backend, or `reference`.
        device: where it runs.
        kernel: None for a reference.
        children: of the ops that the kernel calls, those that the backend must serve.
        direct: the device is of another type than the backend's, and the kernel is forced to run on it.
    """

    op: Op[..., Any]
    target: str
    backend: str
    device: torch.device
    kernel: Kernel | None = None
    children: tuple[str, ...] = ()
    direct: bool = False

    @property
    def composite(self) -> bool:
        """Return whether the kernel is one of backend `torch` of which another backend serves the parts."""
        return bool(self.children) and self.backend != TORCH

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Put the choice of the target in force, also for backward."""
        with ExitStack() as stack:
            # Autograd's own threads for accelerators would not see the choice.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self.kernel is None:
                stack.enter_context(kpt_core.use(REFERENCE, strict=True))
            elif self.direct:
                stack.enter_context(force(self.backend, self.kernel))
            else:
                name = identity(TORCH if self.composite else self.backend, self.kernel)
                stack.enter_context(kpt_core.use(name, op=self.op.name, strict=not self.children))
            for child in self.children:
                stack.enter_context(kpt_core.use(self.backend, op=child))
            yield

    def __str__(self) -> str:
        return f"{self.op.name}-{self.target}"

    def call(self, arguments: Arguments) -> Any:
        """Run it; inside `chosen`, nothing else runs in its place."""
        return self.op(**arguments)

    def record(self, arguments: Arguments) -> Call:
        """Return what a kernel is given for these arguments."""
        needs = dict.fromkeys(n for n, t in tensors_of(arguments).items() if t.requires_grad)
        return self.op.bind(**arguments)._replace(needs=tuple(needs))

    def dtypes(self, table: CaseTable) -> tuple[torch.dtype, ...]:
        """Return those of a table that the kernel takes, rare ones last."""
        return self._taken(table.dtypes) + self.rare(table)

    def rare(self, table: CaseTable) -> tuple[torch.dtype, ...]:
        """Return the rare ones of a table that the kernel takes."""
        return self._taken(table.rare)

    def _taken(self, dtypes: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
        accepted = self.kernel.dtypes if self.kernel else None
        return tuple(d for d in dtypes if accepted is None or str(d).removeprefix("torch.") in accepted)

    def unsupported(self, arguments: Arguments) -> object:
        """Return what the kernel's own function says of a call; None if it has none."""
        if self.kernel is None or self.kernel.unsupported is None:
            return None
        reason: object = load(self.kernel.unsupported)(self.record(arguments))
        return reason

    def refusal(self, arguments: Arguments) -> str | None:
        """Return why it does not take a call, or None."""
        try:
            with self.chosen():
                selection = self.op.explain(**arguments)
        except NoKernelError as error:
            return str(error)
        if self.composite and not any(s.backend == self.backend for s in _tree(selection)):
            return f"{self.backend} serves none of the ops that {self.op.name} calls here"
        return None


def _tree(selection: kpt_core.Selection) -> list[kpt_core.Selection]:
    return [selection, *(s for child in selection.children for s in _tree(child))]
