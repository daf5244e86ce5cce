"""Measures ops in the environment that runs it, as asked on standard input: a line of JSON each way.

`against.py` runs it with the interpreters of two revisions. It knows no more of KPT than any revision has: ops by their
names, and their tables of cases.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kpt_core

try:
    cases: Any = importlib.import_module("kpt_optimize.cases")
except ImportError:  # of an older revision
    cases = importlib.import_module("kpt_core.registry")
TABLES = cases.case_tables()


def entries() -> list[list[object]]:
    """Of each table: op, case, whether it is a real model's or the first one, and dtype."""
    found: list[list[object]] = []
    for op, table in TABLES.items():
        first = next((case.name for case in table.cases if not case.model), None)
        for case in table.cases:
            if (case.model or case.name == first) and not case.large:
                found += [[op, case.name, str(dtype).removeprefix("torch.")] for dtype in table.dtypes]
    return found


class Prepared:
    """A call that can be timed."""

    def __init__(self, op: str, case: str, dtype: str, training: bool) -> None:
        table = TABLES[op]
        row = next(each for each in table.cases if each.name == case)
        self.op = kpt_core.get_op(op)
        self.arguments = table.arguments(row, dtype=getattr(torch, dtype))
        self.training = training
        self.leaves = []
        for name in table.gradients if training else ():
            value = self.arguments.get(name)
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize > 1:
                self.leaves.append(value.requires_grad_())
        with torch.set_grad_enabled(training):
            results = self.results()
        self.pulls = [torch.ones_like(result) for result in results if result.requires_grad]
        self.size = sum(float(result.detach().double().abs().mean()) for result in results if result.numel())
        self.calls = 1

    def results(self) -> list[Tensor]:
        """Floating results of a call."""
        out = self.op(**self.arguments)
        every = out if isinstance(out, tuple | list) else [out]
        return [each for each in every if isinstance(each, Tensor) and each.is_floating_point()]

    def run(self) -> None:
        """Call it once."""
        results = self.results()
        if self.training:
            wanted = [result for result in results if result.requires_grad]
            torch.autograd.grad(wanted, self.leaves, self.pulls, allow_unused=True)

    def seconds(self, least: float) -> float:
        """Time a call, many in a row if one takes less than `least` seconds."""
        with torch.set_grad_enabled(self.training):
            while True:
                start = time.perf_counter()
                for _ in range(self.calls):
                    self.run()
                taken = time.perf_counter() - start
                if taken >= least or self.calls >= 100_000:
                    return taken / self.calls
                self.calls = max(self.calls + 1, int(1.2 * self.calls * least / max(taken, 1e-9)))

    def facts(self) -> dict[str, object]:
        """What must be the same for both, and what ran."""
        tensors = {name: _shape(value) for name, value in self.arguments.items()}
        return {
            "input": json.dumps(tensors, sort_keys=True),
            "size": self.size,
            "kernel": _kernel(lambda: self.op.explain(**self.arguments)),
        }


def _shape(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else str(value)


def _kernel(explain: Callable[[], Any]) -> str:
    try:
        return str(explain().kernel)
    except Exception as error:  # only a remark beside the figures
        return f"unknown: {error}"


def main() -> None:
    """Answer until there are no more questions."""
    prepared: Prepared | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, object]
        try:
            if asked["do"] == "list":
                answer = {"entries": entries()}
            elif asked["do"] == "prepare":
                prepared = None  # so that its memory is free
                prepared = Prepared(asked["op"], asked["case"], asked["dtype"], asked["training"])
                answer = prepared.facts()
            else:
                assert prepared is not None
                answer = {"seconds": prepared.seconds(asked["least"])}
        except Exception as error:  # whatever another revision may raise
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
