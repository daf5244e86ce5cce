"""Cases: the named sizes of an op or a layer, one table for tests, benchmarks and tuning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .errors import InputError, KptError, RegistrationError

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
    """

    name: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    model: bool = False
    large: bool = False


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
        dtypes: in which the op is tried.
        reduction: for given arguments, the greatest number of products that are summed for one element of the result
            or of a gradient; tells how far rounding may go.
    """

    op: str
    build: Callable[..., Arguments]
    cases: tuple[Case, ...]
    wrong: tuple[WrongInput, ...] = ()
    gradients: tuple[str, ...] = ()
    padding: Callable[[Arguments], Mapping[str, Tensor]] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    reduction: Callable[[Arguments], int] | None = None

    def __post_init__(self) -> None:
        for kind, rows in (("case", self.cases), ("wrong input", self.wrong)):
            names = [row.name for row in rows]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise RegistrationError(f"case table of {self.op}: {kind} {twice[0]!r} is there twice")

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

        return {name: place(value) for name, value in made.items()}


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
