"""Which contests there are, in what order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kpt_cli.bench.moe import GateError, Refused, Shape
from kpt_cli.bench.names import GROUPS

from .ceilings import Ceilings
from .contest import Contest, Row
from .experts import decode_contests, prefill_contest
from .float8 import SCHEMES
from .measuring import measure
from .product import product_contest
from .routing import gating_contest, sorting_contest
from .step import step_contest


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        decode: experts of a decode, and how many tokens.
        tokens: of the decodes.
        prefill: experts of prefills, each with its dtypes.
        step: of training steps, likewise.
        product: rows and columns of a single product's matrix.
        rows: of its left side.
        routing: tokens whose experts are chosen and whose rows are sorted.
    """

    decode: Shape
    tokens: Sequence[int]
    prefill: Sequence[tuple[Shape, Sequence[torch.dtype]]]
    step: Sequence[tuple[Shape, Sequence[torch.dtype]]]
    product: int
    rows: Sequence[int]
    routing: Sequence[int]


_SMALL = Shape("32x128, hidden 512", 4096, 512, 2048, 8, 2, gated=False)
_LARGE = Shape("32x128, hidden 1024", 4096, 1024, 4096, 8, 2, gated=False)
_BOTH = (torch.float32, torch.bfloat16)

FULL = Plan(
    decode=Shape("decode", 1, 2048, 1024, 64, 8, gated=True),
    tokens=(1, 4, 8),
    # In float16 PyTorch multiplies at 20 GFLOP/s on many a CPU: the large one would take minutes.
    prefill=((_SMALL, (*_BOTH, torch.float16)), (_LARGE, _BOTH)),
    step=((_SMALL, _BOTH), (_LARGE, _BOTH)),
    product=4096,
    rows=(1, 16),
    routing=(1, 4096),
)
_TINY = Shape("2x64, hidden 128", 128, 128, 256, 8, 2, gated=False)
QUICK = Plan(
    decode=Shape("decode", 1, 256, 128, 16, 4, gated=True),
    tokens=(1, 4),
    prefill=((_TINY, (*_BOTH, torch.float16)),),
    step=((_TINY, _BOTH),),
    product=512,
    rows=(1, 16),
    routing=(1, 256),
)


def rows(plan: Plan, ceilings: Ceilings, groups: Iterable[str], seconds: float, seed: int) -> Iterator[Row | Refused]:
    """Measure every row of the groups.

    Args:
        plan: what there is to measure.
        ceilings: of the machine.
        groups: names of `GROUPS`.
        seconds: about how long the timing of each row takes.
        seed: of weights, inputs and routings.

    Yields:
        A row as soon as it is measured, or `Refused` where a result is not right.
    """
    made: dict[str, Callable[[], Iterator[Contest]]] = {
        "decode": lambda: _decode(plan, seed),
        "product": lambda: (product_contest(plan.product, m, s, seed) for s in SCHEMES for m in plan.rows),
        "prefill": lambda: (prefill_contest(s, dtype, seed) for s, dtypes in plan.prefill for dtype in dtypes),
        "step": lambda: (step_contest(s, dtype, seed) for s, dtypes in plan.step for dtype in dtypes),
        "gating": lambda: _gating(plan, seed),
        "sorting": lambda: (sorting_contest(tokens, 64, 8, seed) for tokens in plan.routing),
    }
    for group in GROUPS:
        if group in groups:
            for contest in made[group]():
                try:
                    yield measure(contest, ceilings, seconds)
                except GateError as error:
                    yield Refused(f"{contest.group} {contest.name}", contest.dtype, str(error))
                del contest  # before the next one's weights are made


def _decode(plan: Plan, seed: int) -> Iterator[Contest]:
    for dtype in _BOTH:
        yield from decode_contests(plan.decode, plan.tokens, dtype, seed)


def _gating(plan: Plan, seed: int) -> Iterator[Contest]:
    for tokens in plan.routing:
        yield gating_contest(tokens, 64, 8, seed, sigmoid=False)
        yield gating_contest(tokens, 256, 8, seed, sigmoid=True)
