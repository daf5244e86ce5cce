"""A trial: a subject on one case in one dtype, and the truth that it is held to."""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from kpt_core import NoKernelError
from kpt_core.selection import REFERENCE
from kpt_optimize.cases import Arguments, Case, CaseTable

from .comparison import Outcome, assert_right, outputs_of, terms_of
from .drawing import drawn_cases
from .subject import Subject
from .tensors import cotangent_like, fresh, tensors_of, with_tensors
from .tolerances import PERTURBATION

#: Changes of the arguments that tell how large the terms are which meet in a result.
_DRAWS = 3
#: Bytes of truths that are kept.
_ROOM = 3 * 2**28
#: Sizes that a kernel takes which asks for multiples of something.
_WHOLE = (16, 32, 64, 128, 256)


def _alike(one: Arguments, other: Arguments) -> bool:
    """Return whether nothing has another dtype in the one than in the other."""
    tensors = tensors_of(other)
    return all(tensor.dtype is tensors[name].dtype for name, tensor in tensors_of(one).items()) and all(
        value is other[name] for name, value in one.items() if isinstance(value, torch.dtype)
    )


def _digest(arguments: Arguments) -> str:
    """Return what two sets of arguments have in common that hold the same values."""
    tensors = tensors_of(arguments)
    others = {name: value for name, value in arguments.items() if name not in tensors}
    described = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    digest = hashlib.blake2b(repr((described, others)).encode())
    for tensor in tensors.values():
        digest.update(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


#: What the references gave for real models' shapes, and how long it took and how large it is: for the next kernel, of
#: which they take many times the time. What took longest is kept, as far as there is room.
_truths: dict[tuple[Any, ...], tuple[float, int, tuple[Outcome, Outcome]]] = {}
_lock = threading.Lock()


def _kept(key: tuple[Any, ...], make: Callable[[], tuple[Outcome, Outcome]]) -> tuple[Outcome, Outcome]:
    with _lock:
        if key in _truths:
            return _truths[key][2]
    start = time.perf_counter()
    made = make()
    size = sum(tensor.nbytes for outcome in made for tensor in outcome.named().values())
    with _lock:
        _truths[key] = time.perf_counter() - start, size, made
        while sum(each[1] for each in _truths.values()) > _ROOM:
            del _truths[min(_truths, key=lambda each: _truths[each][0])]
    return made


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
        """Return whether gradients belong to what is promised."""
        kernel = self.subject.kernel
        return bool(self.table.gradients) and (kernel is None or kernel.differentiable or kernel.backward is not None)

    def forward_only(self) -> Self:
        """Return the trial without gradients."""
        return replace(self, table=replace(self.table, gradients=()))

    def arguments(self, seed: int = 0) -> Arguments:
        """Return arguments on the subject's device; skips the test if the subject refuses them.

        Where it refuses the table's first case, another one that it takes stands in: so every check is asked something.
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
        try:
            return self.table.arguments(case, dtype=self.dtype, device=self.subject.device, seed=seed)
        except RuntimeError as error:
            if self.subject.device.type != "xla" or "Type not supported" not in str(error):
                raise
            pytest.skip(f"torch_xla has no such tensors: {error}")

    def stand_in(self) -> Case | None:
        """Return a case that the subject takes in the place of a table's first: a named one, or the smallest of any."""
        domain, named = self.table.domain, [case for case in self.table.cases if not (case.model or case.large)]
        if self.case is not self.table.cases[0]:
            return None
        for case in named:
            if 0 not in case.sizes.values() and self.refusal(self._made(case)) is None:
                return case
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
        """Return why the subject does not take the arguments, with gradients where those are promised; or None."""
        refusal = self.subject.refusal(self.leaves(arguments) if self.differentiable else arguments)
        if refusal is None and self.subject.children and self.differentiable:
            # What backward asks of the parts is seen only where it runs.
            try:
                self.run(arguments)
            except NoKernelError as error:
                return str(error)
        return refusal

    def takes(self, arguments: Arguments) -> bool:
        """Return whether the op says what such arguments give, and the subject does not refuse them."""
        specified = self.table.specified is None or self.table.specified(arguments)
        return specified and self.refusal(arguments) is None

    def wants_gradient(self, name: str, value: Any) -> bool:
        """Return whether a gradient of an argument is promised: 8-bit numbers are frozen."""
        promised = name in self.table.gradients
        return promised and isinstance(value, Tensor) and value.dtype.itemsize > 1

    def mutates(self, name: str) -> bool:
        """Return whether the op changes the argument."""
        return name in self.subject.op.mutates

    def leaves(self, arguments: Arguments) -> Arguments:
        """Return the same memory, the differentiable arguments as leaves that want gradients; copies of the mutated."""

        def leaf(name: str, tensor: Tensor) -> Tensor:
            tensor = fresh(tensor) if self.mutates(name) else tensor.detach()
            return tensor.requires_grad_() if self.wants_gradient(name, tensor) else tensor

        return with_tensors(arguments, leaf)

    def outputs(
        self, leaves: Arguments, call: Callable[[Arguments], Any] | None = None, calls: int = 1
    ) -> dict[str, Tensor]:
        """Return the results of a call, and what it left in the arguments that it mutates.

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
        """Return the result for arguments and, if promised, the gradients for random cotangents.

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
        """Return gradients of the differentiable arguments for random cotangents of the outputs.

        Args:
            leaves: as `leaves` gives them.
            outputs: that hang on their graph.
            cotangent: as in `run`.
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

    def truth(self, arguments: Arguments, **how: Any) -> tuple[Outcome, Outcome]:
        """Return what the reference gives in this dtype (what rounding costs) and in float64 (what is right)."""
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

        def made() -> tuple[Outcome, Outcome]:
            baseline = reference.run(narrow, **how)
            # Where all is float64 the two are one.
            return baseline, baseline if _alike(narrow, widened) else reference.run(widened, **how)

        if self.case.model and how.get("cotangent") is None:
            what = (self.subject.op, self.dtype, self.subject.device, table.gradients, self.differentiable)
            baseline, oracle = _kept((*what, how.get("twice"), how.get("calls"), _digest(narrow)), made)
        else:
            baseline, oracle = made()
        reduction = self.table.reduction(arguments) if self.table.reduction else 1

        def terms() -> dict[str, Tensor]:
            runs = (reference._nearby(widened, draw, **how) for draw in range(_DRAWS))
            return terms_of(oracle, list(runs))

        left = self.table.leave if not self.differentiable else None
        return baseline, replace(
            oracle,
            reduction=reduction,
            terms=terms,
            exact=self.table.exact,
            tolerances=self.table.tolerances,
            leave=0.0 if left is None else left(arguments),
        )

    def _nearby(
        self, arguments: Arguments, draw: int, cotangent: Callable[[Tensor], Tensor] | None = None, **how: Any
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
        return self.run(near, cotangent=pulled, **how)

    def forward_truth(self, arguments: Arguments, dtype: torch.dtype | None = None) -> tuple[Outcome, Outcome]:
        """`truth` without gradients, for arguments in another dtype than the trial's if `dtype` is given."""
        return replace(self.forward_only(), dtype=dtype or self.dtype).truth(arguments)

    def outcome(self, outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> Outcome:
        """Return an outcome of outputs that still hang on their graph."""
        return Outcome({name: out.detach() for name, out in outputs.items()}, gradients)

    def assert_right(self, arguments: Arguments, got: Outcome, what: str = "") -> None:
        """Raise `AssertionError` if `got` is not right for these arguments; the message begins with `what`."""
        __tracebackhide__ = True
        assert_right(got, *self.truth(arguments), what)
