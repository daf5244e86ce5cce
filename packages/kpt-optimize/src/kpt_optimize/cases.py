"""Cases: the named sizes of an op or a layer, one table for tests, benchmarks and tuning."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any

import torch
from torch import Tensor, nn

from kpt_core import InputError, KptError, RegistrationError, registry
from kpt_core.discovery import discovered

Arguments = dict[str, Any]
"""What an op is called with, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of an op's table.

    Attributes:
        name: unique within the table; a real model's case has the model's name.
        sizes: what `CaseTable.build` is called with.
        model: the shapes are a real model's: benchmarks and tuning use the case too.
        large: too large for a CPU in float64; run on accelerators alone.
        drawn: nobody wrote it: the conformance suite drew it from the table's domain.
        once: only the suite's check of values tries it, in one dtype, and no interpreter does: the dtype of this place,
            counted round and round. None: it is tried as often as any.
    """

    name: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    model: bool = False
    large: bool = False
    drawn: bool = False
    once: int | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a dimension may be.

    Attributes:
        least: that the op takes: 0 or 1.
        most: that is tried; past every tile and threshold of a kernel.
        many: a number that a few cases have beside, whatever `most` is, while all else is small: past what int16 counts
            and what a grid of programs holds, or a width that real models have. None: no case has.
        usual: that models have, whatever `most` is: the rows of decoding, widths, contexts. Each meets each of the
            other dimensions' in a case, where that is allowed.
    """

    least: int = 0
    most: int = 513
    many: int | None = None
    usual: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise RegistrationError(f"sizes must have 0 <= least <= most; got least={self.least} and most={self.most}")
        if self.many is not None and self.many <= self.most:
            raise RegistrationError(f"sizes must have many > most; got most={self.most} and many={self.many}")
        small = [size for size in self.usual if size < self.least]
        if small:
            raise RegistrationError(f"sizes must have usual >= least; got least={self.least} and usual={self.usual}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Domain:
    """What an op documents that it takes, in terms of what its table's `build` is called with.

    Attributes:
        sizes: the dimensions, by the names of build's arguments; each is drawn independently of the others.
        options: every documented value of each other argument of build; the first is what build does without it.
        allowed: whether build may be called with these values together; what the op calls wrong is left out here. It is
            asked with all options, and with all options and sizes.
        seldom: options whose values meet each of the others' in a small case that is tried once, and no two of these at
            a time; any other option's do so again and again. For those that a path of their own hardly has.
        sized: options each of whose values meets every two usual sizes, as a granularity does whose path is its own.
        families: by the names of models, what these ask the op for: arguments of build, with sizes and values of
            options that nothing else has. Each is a case.
    """

    sizes: Mapping[str, Sizes] = field(default_factory=dict)
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    seldom: tuple[str, ...] = ()
    sized: tuple[str, ...] = ()
    families: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    allowed: Callable[[Mapping[str, Any]], bool] = lambda values: True

    def __post_init__(self) -> None:
        both = sorted(self.sizes.keys() & self.options.keys())
        if both:
            raise RegistrationError(f"domain: {both[0]!r} is among the sizes and the options; leave it in one of them")
        for name, values in self.options.items():
            if len(values) < 2:
                raise RegistrationError(f"domain: option {name!r} must have two values at least; got {values}")
        unknown = sorted({*self.sized, *self.seldom} - self.options.keys())
        if unknown:
            raise RegistrationError(f"domain: sized or seldom names {unknown[0]!r}, which is none of the options")
        if not self.allowed({name: values[0] for name, values in self.options.items()}):
            raise RegistrationError("domain: the first values of all options must be allowed together")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongInput:
    """A call that an op must refuse, and how.

    Attributes:
        name: unique within the table.
        change: gives the arguments that it makes wrong, from right ones.
        message: regular expression that the error's message must match: the offending value and what was expected.
        error: the type that is raised.
        sizes: of the right arguments, for `CaseTable.build`.
    """

    name: str
    change: Callable[[Arguments], Arguments]
    message: str
    error: type[KptError] = InputError
    sizes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far one result of an op's kernels may be from the truth, relative to the reference's own error.

    Attributes:
        mean: factor on the reference's mean error, 1.1 as a rule.
        maximum: factor on the reference's largest error, 2 as a rule.
        reason: why not what is the rule.
    """

    mean: float
    maximum: float
    reason: str

    def __post_init__(self) -> None:
        if self.mean < 0 or self.maximum < 0 or not self.reason:
            raise RegistrationError(f"an accuracy needs factors that are not negative, and a reason; got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTable:
    """What an op is tried on: every kernel of it, by the same rows.

    Attributes:
        op: name of the op.
        build: makes the arguments of a case on the CPU, from a generator and the case's sizes. Tensors that take the
            dtype of a run are made in float64; tensors of any other dtype (ids, offsets, float32 scales) stay as made.
            A dtype among the arguments that is float64 becomes that of the run, too.
        cases: the rows; among them sizes 0, 1 and 63, and a real model's.
        wrong: calls that the op must refuse.
        gradients: names of the arguments that the op is differentiable in.
        padding: for given arguments, the elements of some of them that no result may depend on, as boolean masks that
            broadcast to the argument's shape; None if there are none.
        dtypes: in which the op is tried, tuned and measured.
        rare: dtypes that the op documents and few use, float64 as a rule: tried too, on few cases, and neither tuned
            nor measured.
        reduction: for given arguments, the greatest number of products that are summed for one element of the result
            or of a gradient; tells how far rounding may go.
        domain: what the op documents: the conformance suite draws cases from it and fails for what none of them has.
        kept: names of arguments that stay as made even in float64, because the op documents them in float64 too.
        exact: what must equal the reference in the same dtype bit for bit, as a quantiser's codes: everything, or what
            the suite's messages call `result`, `result 1`, `gradient of x`, `cache afterwards`.
        tolerances: of what is not held to the usual bounds, by the same names.
        specified: whether the op says what arguments give, where the suite changes their magnitudes or plants NaN; of
            scores that tie for instance it may not. None: it always does.
        estimated: whether, for given arguments, the gradient is an estimate by convention, as where a number that is
            rounded to 8 bits counts as if it were not (straight-through, arXiv:1308.3432): finite differences of a
            staircase are no measure then. None: it never is.
        leave: for given arguments, the part of its size by which a result without gradients may be off beyond rounding,
            as where kernels may round arguments to 8 bits. None: nothing.
        linear_in: dimensions of which the op says that memory is linear in them: kernels take twice as much where all
            of them are twice as large, forward and backward, and not four times. Empty: it says nothing.
    """

    op: str
    build: Callable[..., Arguments]
    cases: tuple[Case, ...]
    wrong: tuple[WrongInput, ...] = ()
    gradients: tuple[str, ...] = ()
    padding: Callable[[Arguments], Mapping[str, Tensor]] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    rare: tuple[torch.dtype, ...] = ()
    reduction: Callable[[Arguments], int] | None = None
    domain: Domain | None = None
    kept: frozenset[str] = frozenset()
    exact: frozenset[str] | bool = False
    tolerances: Mapping[str, Accuracy] = field(default_factory=dict)
    specified: Callable[[Arguments], bool] | None = None
    estimated: Callable[[Arguments], bool] | None = None
    leave: Callable[[Arguments], float] | None = None
    linear_in: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind, rows in (("case", self.cases), ("wrong input", self.wrong)):
            names = [row.name for row in rows]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise RegistrationError(f"case table of {self.op}: {kind} {twice[0]!r} is there twice")
        both = sorted(map(str, {*self.dtypes} & {*self.rare}))
        if both:
            raise RegistrationError(f"case table of {self.op}: {both[0]} is among dtypes and rare; leave it in one")

    def arguments(
        self,
        case: Case | WrongInput,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> Arguments:
        """The arguments of a case: the same values for every dtype, up to its rounding, and on every device."""
        made = self.build(torch.Generator().manual_seed(seed), **case.sizes)

        def place(value: Any) -> Any:
            if isinstance(value, list):
                return [place(each) for each in value]
            if not isinstance(value, Tensor):
                return dtype if value is torch.float64 else value
            return value.to(device=device, dtype=dtype if value.dtype is torch.float64 else value.dtype)

        def keep(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        return {name: keep(value) if name in self.kept else place(value) for name, value in made.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase:
    """A layer that must be at home on every device.

    Attributes:
        name: `family.Layer`, for instance `moe.MoELayer`; unique.
        make: builds the layer on a device, in a dtype.
        inputs: makes what the layer is called with, on the CPU, from a generator; floating tensors in float32.
        config: makes the layer's configuration, which can be pickled and compared; None if it has none.
    """

    name: str
    make: Callable[[torch.device, torch.dtype], nn.Module]
    inputs: Callable[[torch.Generator], tuple[Any, ...]]
    config: Callable[[], Any] | None = None


def _cases() -> dict[str, CaseTable | LayerCase]:
    def check(entry: EntryPoint, value: Any) -> Iterator[tuple[str, CaseTable | LayerCase]]:
        for table in value:
            if not isinstance(table, CaseTable | LayerCase):
                raise RegistrationError(f"{entry.value} lists {table!r}; expected CaseTables and LayerCases")
            yield table.op if isinstance(table, CaseTable) else table.name, table

    return discovered("kpt.cases", check)


def case_tables() -> dict[str, CaseTable]:
    """Return case tables of installed packages by the name of their op (entry points of the group `kpt.cases`)."""
    return {name: table for name, table in _cases().items() if isinstance(table, CaseTable)}


def layer_cases() -> dict[str, LayerCase]:
    """Return layers of installed packages by name (entry points of the group `kpt.cases`)."""
    return {name: layer for name, layer in _cases().items() if isinstance(layer, LayerCase)}


registry.on_problems(_cases)
