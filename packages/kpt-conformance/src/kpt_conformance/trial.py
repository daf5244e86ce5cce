"""A trial: one kernel, or a reference, on one case in one dtype; and the truth that it is held to."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Arguments, Case, CaseTable, Kernel, NoKernelError, Op

from .comparison import Outcome, assert_right, outputs_of

REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is tried.

    Attributes:
        op: the op.
        target: full name of the kernel; `reference`; or a backend's name, for a composite op that it serves through
            the ops of which that is composed.
        backend: name of the backend, or `reference`.
        device: where it runs.
        kernel: None for a reference or a composite.
        children: for a composite, the ops of which it is composed and that the backend serves.
        direct: call the kernel itself rather than the op: where dispatch would refuse, as on another device.
    """

    op: Op[..., Any]
    target: str
    backend: str
    device: torch.device
    kernel: Kernel | None = None
    children: tuple[str, ...] = ()
    direct: bool = False

    def _choices(self) -> list[tuple[str, str]]:
        """(op, what must serve it)."""
        if self.direct:
            return []
        if self.children:
            return [(self.op.name, REFERENCE), *((child, self.backend) for child in self.children)]
        return [("*" if self.kernel is None else self.op.name, self.target)]

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Put the choice of the target in force, also for backward."""
        with ExitStack() as stack:
            # Autograd's own threads for accelerators would not see the choice.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            for op, name in self._choices():
                stack.enter_context(kpt_core.use(name, op=op, strict=not self.children))
            yield

    def __str__(self) -> str:
        return f"{self.op.name}-{self.target}"

    def call(self, arguments: Arguments) -> Any:
        """Run it, and nothing else in its place; inside `chosen`."""
        args, kwargs = self.split(arguments)
        return self.function()(*args, **kwargs)

    def function(self) -> Callable[..., Any]:
        """What `call` calls: the op, or the kernel past dispatch."""
        return self.kernel.load() if self.direct and self.kernel is not None else self.op

    def split(self, arguments: Arguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments by position where the op takes them so."""
        positional, named = [], dict(arguments)
        for name, parameter in inspect.signature(self.op.reference).parameters.items():
            if name not in named or parameter.kind is parameter.KEYWORD_ONLY:
                break
            positional.append(named.pop(name))
        return tuple(positional), named

    def dtypes(self, table: CaseTable) -> tuple[torch.dtype, ...]:
        """Those of a table that the kernel takes."""
        accepted = self.kernel.dtypes if self.kernel else None
        return tuple(d for d in table.dtypes if accepted is None or str(d).removeprefix("torch.") in accepted)

    def refusal(self, arguments: Arguments) -> str | None:
        """Why it does not take a call, or None."""
        args, kwargs = self.split(arguments)
        if self.direct:
            unsupported = self.kernel.load_unsupported() if self.kernel else None
            return unsupported(*args, **kwargs) if unsupported else None
        try:
            with self.chosen():
                selection = self.op.explain(*args, **kwargs)
        except NoKernelError as error:
            return str(error)
        if self.children and not any(s.backend == self.backend for s in _tree(selection)):
            return f"{self.backend} serves none of the ops that {self.op.name} calls here"
        return None


def _tree(selection: kpt_core.Selection) -> list[kpt_core.Selection]:
    return [selection, *(s for child in selection.children for s in _tree(child))]


@dataclass(frozen=True, slots=True)
class Trial:
    """A subject on a case in a dtype."""

    subject: Subject
    table: CaseTable
    case: Case
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.subject}-{self.case.name}-{dtype}"

    @property
    def differentiable(self) -> bool:
        """Whether gradients belong to what is promised."""
        return bool(self.table.gradients) and not (self.subject.kernel and self.subject.kernel.forward_only)

    def arguments(self, seed: int = 0) -> Arguments:
        """Arguments on the subject's device; skips the test if the subject refuses them."""
        made = self.table.arguments(self.case, dtype=self.dtype, device=self.subject.device, seed=seed)
        refusal = self.refusal(made)
        if refusal is not None:
            pytest.skip(f"refused: {refusal}")
        return made

    def refusal(self, arguments: Arguments) -> str | None:
        """Why the subject does not take the arguments, with gradients where those are promised; or None."""
        refusal = self.subject.refusal(self.leaves(arguments) if self.differentiable else arguments)
        if refusal is None and self.subject.children and self.differentiable:
            # What backward asks of the parts is seen only where it runs.
            try:
                self.run(arguments)
            except NoKernelError as error:
                return str(error)
        return refusal

    def wants_gradient(self, name: str, value: Any) -> bool:
        """Whether a gradient of an argument is promised: 8-bit numbers are frozen."""
        return name in self.table.gradients and isinstance(value, Tensor) and value.dtype.itemsize > 1

    def leaves(self, arguments: Arguments) -> Arguments:
        """The same memory, the differentiable arguments as leaves that want gradients."""
        return {
            name: value.requires_grad_() if self.wants_gradient(name, value) else value
            for name, value in ((n, v.detach() if isinstance(v, Tensor) else v) for n, v in arguments.items())
        }

    def run(
        self,
        arguments: Arguments,
        call: Callable[[Arguments], Any] | None = None,
        cotangent: Callable[[Tensor], Tensor] | None = None,
    ) -> Outcome:
        """The result for arguments and, if promised, the gradients for random cotangents.

        Args:
            arguments: strides are kept.
            call: what to call instead of the subject.
            cotangent: changes the layout of each cotangent.
        """
        call = call or self.subject.call
        with self.subject.chosen():
            if not self.differentiable:
                with torch.no_grad():
                    return Outcome(outputs_of(call(arguments)), {})
            leaves = self.leaves(arguments)
            outputs = outputs_of(call(leaves))
            return Outcome(
                {name: out.detach() for name, out in outputs.items()}, self.gradients(leaves, outputs, cotangent)
            )

    def gradients(
        self,
        leaves: Arguments,
        outputs: Mapping[str, Tensor],
        cotangent: Callable[[Tensor], Tensor] | None = None,
        retain_graph: bool = False,
    ) -> dict[str, Tensor | None]:
        """Gradients of the differentiable arguments for random cotangents of the outputs."""
        wanted = {n: v for n, v in leaves.items() if self.wants_gradient(n, v)}
        pulled = {name: out for name, out in outputs.items() if out.is_floating_point() and out.requires_grad}
        if not pulled:
            return dict.fromkeys(wanted)
        change = cotangent or (lambda pull: pull)
        pulls = [change(cotangent_like(out, index)) for index, out in enumerate(pulled.values())]
        gradients = torch.autograd.grad(
            list(pulled.values()), list(wanted.values()), pulls, allow_unused=True, retain_graph=retain_graph
        )
        return dict(zip(wanted, gradients, strict=True))

    def truth(
        self, arguments: Arguments, cotangent: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Outcome, Outcome]:
        """The reference in this dtype (what rounding costs) and in float64 (what is right), for these values."""
        subject = replace(self.subject, target=REFERENCE, backend=REFERENCE, kernel=None, children=(), direct=False)
        # A forward-only kernel is held to the forward alone.
        table = self.table if self.differentiable else replace(self.table, gradients=())
        reference = replace(self, subject=subject, table=table)

        def plain(value: Any, wide: bool) -> Any:
            if not isinstance(value, Tensor):
                return torch.float64 if wide and value is self.dtype else value
            value = value.detach().clone(memory_format=torch.contiguous_format)
            return value.double() if wide and value.dtype is self.dtype else value

        baseline, oracle = (
            reference.run({name: plain(value, wide) for name, value in arguments.items()}, cotangent=cotangent)
            for wide in (False, True)
        )
        reduction = self.table.reduction(arguments) if self.table.reduction else 1
        return baseline, replace(oracle, reduction=reduction)

    def forward_truth(self, arguments: Arguments, dtype: torch.dtype | None = None) -> tuple[Outcome, Outcome]:
        """`truth` without gradients, for arguments in another dtype than the trial's if `dtype` is given."""
        plain = replace(self, table=replace(self.table, gradients=()), dtype=dtype or self.dtype)
        return plain.truth(arguments)

    def outcome(self, outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> Outcome:
        """An outcome of outputs that still hang on their graph."""
        return Outcome({name: out.detach() for name, out in outputs.items()}, gradients)

    def assert_right(self, arguments: Arguments, got: Outcome, what: str = "") -> None:
        """Raise `AssertionError` unless `got` is right for these arguments; the message begins with `what`."""
        assert_right(got, *self.truth(arguments), what)


def cotangent_like(out: Tensor, index: int = 0) -> Tensor:
    """A random cotangent for an output: never constant, since a sum would hide what is summed wrongly."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    """The tensors among arguments."""
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
