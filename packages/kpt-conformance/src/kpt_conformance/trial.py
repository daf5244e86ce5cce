"""A trial: one kernel, or a reference, on one case in one dtype; and the truth that it is held to."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Call, Kernel, NoKernelError, Op
from kpt_core.contract import TORCH, identity, load
from kpt_core.dispatch import force
from kpt_core.selection import REFERENCE
from kpt_optimize.cases import Arguments, Case, CaseTable

from .comparison import Outcome, assert_right, outputs_of, terms_of
from .drawing import drawn_cases
from .tensors import cotangent_like, fresh, tensors_of, with_tensors
from .tolerances import PERTURBATION

#: Changes of the arguments that tell how large the terms are which meet in a result.
_DRAWS = 3
#: Bytes of truths that are kept.
_ROOM = 3 * 2**28
#: Sizes that a kernel takes which asks for multiples of something.
_WHOLE = (16, 32, 64, 128, 256)


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
        """Whether the kernel is one of backend `torch` of which another backend serves the parts."""
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
        """What a kernel is given for these arguments."""
        needs = dict.fromkeys(n for n, t in tensors_of(arguments).items() if t.requires_grad)
        return self.op.bind(**arguments)._replace(needs=tuple(needs))

    def dtypes(self, table: CaseTable) -> tuple[torch.dtype, ...]:
        """Those of a table that the kernel takes, rare ones last."""
        return self._taken(table.dtypes) + self.rare(table)

    def rare(self, table: CaseTable) -> tuple[torch.dtype, ...]:
        """The rare ones of a table that the kernel takes."""
        return self._taken(table.rare)

    def _taken(self, dtypes: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
        accepted = self.kernel.dtypes if self.kernel else None
        return tuple(d for d in dtypes if accepted is None or str(d).removeprefix("torch.") in accepted)

    def unsupported(self, arguments: Arguments) -> object:
        """What the kernel's own function says of a call; None if it has none."""
        if self.kernel is None or self.kernel.unsupported is None:
            return None
        reason: object = load(self.kernel.unsupported)(self.record(arguments))
        return reason

    def refusal(self, arguments: Arguments) -> str | None:
        """Why it does not take a call, or None."""
        try:
            with self.chosen():
                selection = self.op.explain(**arguments)
        except NoKernelError as error:
            return str(error)
        if self.composite and not any(s.backend == self.backend for s in _tree(selection)):
            return f"{self.backend} serves none of the ops that {self.op.name} calls here"
        return None


def _alike(one: Arguments, other: Arguments) -> bool:
    """Whether nothing has another dtype in the one than in the other."""
    tensors = tensors_of(other)
    return all(tensor.dtype is tensors[name].dtype for name, tensor in tensors_of(one).items()) and all(
        value is other[name] for name, value in one.items() if isinstance(value, torch.dtype)
    )


def _tree(selection: kpt_core.Selection) -> list[kpt_core.Selection]:
    return [selection, *(s for child in selection.children for s in _tree(child))]


def _digest(arguments: Arguments) -> str:
    """What two sets of arguments have in common that hold the same values."""
    tensors = tensors_of(arguments)
    others = {name: value for name, value in arguments.items() if name not in tensors}
    described = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    digest = hashlib.blake2b(repr((described, others)).encode())
    for tensor in tensors.values():
        digest.update(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _Truths:
    """What the references gave for real models' shapes, for the next kernel: it takes many times what a kernel does.

    What took longest is kept, as far as there is room.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, ...], tuple[float, int, tuple[Outcome, Outcome]]] = {}
        self.lock = threading.Lock()

    def of(self, key: tuple[Any, ...], make: Callable[[], tuple[Outcome, Outcome]]) -> tuple[Outcome, Outcome]:
        """What is kept, or is made now."""
        with self.lock:
            if key in self.kept:
                return self.kept[key][2]
        start = time.perf_counter()
        made = make()
        size = sum(tensor.nbytes for outcome in made for tensor in outcome.named().values())
        with self.lock:
            self.kept[key] = time.perf_counter() - start, size, made
            while sum(each[1] for each in self.kept.values()) > _ROOM:
                del self.kept[min(self.kept, key=lambda each: self.kept[each][0])]
        return made


_TRUTHS = _Truths()


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
        kernel = self.subject.kernel
        return bool(self.table.gradients) and (kernel is None or kernel.differentiable or kernel.backward is not None)

    def arguments(self, seed: int = 0) -> Arguments:
        """Arguments on the subject's device; skips the test if the subject refuses them.

        If it refuses all that the table names, the smallest that it takes stand in for those of the first case: so
        every check is asked something.
        """
        made = self._made(self.case, seed)
        refusal = self.refusal(made)
        if refusal is not None:
            other = self.stand_in()
            if other is None:
                pytest.skip(f"refused: {refusal}")
            made = self._made(other, seed)
        return made

    def _made(self, case: Case, seed: int = 0) -> Arguments:
        return self.table.arguments(case, dtype=self.dtype, device=self.subject.device, seed=seed)

    def stand_in(self) -> Case | None:
        """The smallest case that the subject takes, for the first case of a table of which it takes no small one."""
        domain, named = self.table.domain, [case for case in self.table.cases if not (case.model or case.large)]
        if self.case is not self.table.cases[0] or any(self.refusal(self._made(case)) is None for case in named):
            return None
        found: list[Case] = []
        if domain is not None:
            first = {name: values[0] for name, values in domain.options.items()}
            for size in _WHOLE:
                sizes = {n: min(max(size, allowed.least), allowed.most) for n, allowed in domain.sizes.items()}
                if domain.allowed({**first, **sizes}):
                    found.append(Case(name=f"{size} of each", sizes={**first, **sizes}))
        for case in (*found, *drawn_cases(self.table)):
            if case.once is None and self.refusal(self._made(case)) is None:
                return case
        return None

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

    def takes(self, arguments: Arguments) -> bool:
        """Whether the op says what such arguments give, and the subject does not refuse them."""
        specified = self.table.specified is None or self.table.specified(arguments)
        return specified and self.refusal(arguments) is None

    def wants_gradient(self, name: str, value: Any) -> bool:
        """Whether a gradient of an argument is promised: 8-bit numbers are frozen."""
        promised = name in self.table.gradients
        return promised and isinstance(value, Tensor) and value.dtype.itemsize > 1

    def mutates(self, name: str) -> bool:
        """Whether the op changes the argument."""
        return name in self.subject.op.mutates

    def leaves(self, arguments: Arguments) -> Arguments:
        """The same memory, the differentiable arguments as leaves that want gradients; copies of what is mutated."""

        def leaf(name: str, tensor: Tensor) -> Tensor:
            tensor = fresh(tensor) if self.mutates(name) else tensor.detach()
            return tensor.requires_grad_() if self.wants_gradient(name, tensor) else tensor

        return with_tensors(arguments, leaf)

    def outputs(
        self, leaves: Arguments, call: Callable[[Arguments], Any] | None = None, calls: int = 1
    ) -> dict[str, Tensor]:
        """Results of a call, and what it left in the arguments that it mutates.

        Args:
            leaves: as `leaves` gives them.
            call: what to call instead of the subject.
            calls: how often in a row; the results are the last one's.
        """
        for _ in range(calls - 1):
            (call or self.subject.call)(leaves)
        results = outputs_of((call or self.subject.call)(leaves))
        changed = {f"{name} afterwards": t.detach() for name, t in tensors_of(leaves).items() if self.mutates(name)}
        return {**results, **changed}

    def run(
        self,
        arguments: Arguments,
        call: Callable[[Arguments], Any] | None = None,
        cotangent: Callable[[Tensor], Tensor] | None = None,
        twice: bool = False,
        calls: int = 1,
    ) -> Outcome:
        """The result for arguments and, if promised, the gradients for random cotangents.

        Args:
            arguments: strides are kept.
            call: what to call instead of the subject.
            cotangent: changes the layout of each cotangent.
            twice: second derivatives in place of the first.
            calls: how often in a row it is called on the same tensors; the result is the last one's.
        """
        leaves = self.leaves(arguments)
        with self.subject.chosen(), torch.set_grad_enabled(self.differentiable):
            outputs = self.outputs(leaves, call, calls)
            gradients: Mapping[str, Tensor | None] = {}
            if self.differentiable:
                gradients = self.gradients(leaves, outputs, cotangent, create_graph=twice)
            if twice:
                gradients = self._second(leaves, gradients)
        return self.outcome(outputs, gradients)

    def gradients(
        self,
        leaves: Arguments,
        outputs: Mapping[str, Tensor],
        cotangent: Callable[[Tensor], Tensor] | None = None,
        **options: bool,
    ) -> dict[str, Tensor | None]:
        """Gradients of the differentiable arguments for random cotangents of the outputs.

        Args:
            leaves: as `leaves` gives them.
            outputs: that hang on their graph.
            cotangent: changes the layout of each cotangent.
            **options: of `torch.autograd.grad`.
        """
        wanted = {n: t for n, t in tensors_of(leaves).items() if self.wants_gradient(n, t)}
        pulled = {name: out for name, out in outputs.items() if out.is_floating_point() and out.requires_grad}
        if not pulled:
            return dict.fromkeys(wanted)
        change = cotangent or (lambda pull: pull)
        pulls = [change(cotangent_like(out, index)) for index, out in enumerate(pulled.values())]
        gradients = torch.autograd.grad(
            list(pulled.values()), list(wanted.values()), pulls, allow_unused=True, **options
        )
        return dict(zip(wanted, gradients, strict=True))

    def _second(self, leaves: Arguments, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Derivatives of a random combination of gradients; zero where they don't depend on an argument."""
        again = {f"gradient of {n}": g for n, g in gradients.items() if g is not None}
        second = self.gradients(leaves, again)
        return {n: torch.zeros_like(tensors_of(leaves)[n]) if g is None else g for n, g in second.items()}

    def truth(
        self,
        arguments: Arguments,
        cotangent: Callable[[Tensor], Tensor] | None = None,
        twice: bool = False,
        calls: int = 1,
    ) -> tuple[Outcome, Outcome]:
        """The reference in this dtype (what rounding costs) and in float64 (what is right), for these values."""
        subject = replace(self.subject, target=REFERENCE, backend=REFERENCE, kernel=None, children=(), direct=False)
        # A forward-only kernel is held to the forward alone.
        table = self.table if self.differentiable else replace(self.table, gradients=())
        reference = replace(self, subject=subject, table=table)

        def plain(name: str, tensor: Tensor) -> Tensor:
            return tensor.detach().clone(memory_format=torch.contiguous_format)

        def wide(name: str, tensor: Tensor) -> Tensor:
            # A gradient has its argument's dtype, which may be another than that of the trial.
            widened = tensor.dtype is self.dtype or self.wants_gradient(name, tensor)
            return plain(name, tensor).double() if widened else plain(name, tensor)

        def result(value: Any) -> Any:
            rounded = isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize > 1
            return torch.float64 if rounded else value

        widened = {name: result(value) for name, value in with_tensors(arguments, wide).items()}
        narrow = with_tensors(arguments, plain)
        how: dict[str, Any] = {"cotangent": cotangent, "twice": twice, "calls": calls}

        def made() -> tuple[Outcome, Outcome]:
            baseline = reference.run(narrow, **how)
            # Where all is float64 the two are one.
            return baseline, baseline if _alike(narrow, widened) else reference.run(widened, **how)

        if self.case.model and cotangent is None:
            what = (self.subject.op, self.dtype, self.subject.device, table.gradients, self.differentiable)
            baseline, oracle = _TRUTHS.of((*what, twice, calls, _digest(narrow)), made)
        else:
            baseline, oracle = made()
        reduction = self.table.reduction(arguments) if self.table.reduction else 1

        def terms() -> dict[str, Tensor]:
            runs = (reference._nearby(widened, draw, **how) for draw in range(_DRAWS))
            return terms_of(oracle, list(runs))

        return baseline, replace(
            oracle, reduction=reduction, terms=terms, exact=self.table.exact, tolerances=self.table.tolerances
        )

    def _nearby(
        self, arguments: Arguments, draw: int, cotangent: Callable[[Tensor], Tensor] | None, twice: bool, calls: int
    ) -> Outcome:
        """The result where every float64 argument and cotangent is changed by a random small part of itself."""
        generator = torch.Generator().manual_seed(draw)

        def changed(tensor: Tensor) -> Tensor:
            if tensor.dtype is not torch.float64:
                return tensor
            sign = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor) * 2 - 1
            return tensor * (1 + PERTURBATION * sign)

        near = with_tensors(arguments, lambda name, tensor: changed(tensor))
        pulled = lambda pull: changed(cotangent(pull) if cotangent else pull)  # noqa: E731
        return self.run(near, cotangent=pulled, twice=twice, calls=calls)

    def forward_truth(self, arguments: Arguments, dtype: torch.dtype | None = None) -> tuple[Outcome, Outcome]:
        """`truth` without gradients, for arguments in another dtype than the trial's if `dtype` is given."""
        plain = replace(self, table=replace(self.table, gradients=()), dtype=dtype or self.dtype)
        return plain.truth(arguments)

    def outcome(self, outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> Outcome:
        """An outcome of outputs that still hang on their graph."""
        return Outcome({name: out.detach() for name, out in outputs.items()}, gradients)

    def assert_right(self, arguments: Arguments, got: Outcome, what: str = "") -> None:
        """Raise `AssertionError` if `got` is not right for these arguments; the message begins with `what`."""
        __tracebackhide__ = True
        assert_right(got, *self.truth(arguments), what)
