"""Trying a random share of what records prove, and all of what they don't: a record that was not earned is found."""

import math
import random
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch

from kpt_core import KptError
from kpt_core.evidence import Claim, Level, Record, proofs

from .evidence import claim_of, level_here
from .evidence.provenance import ran_with
from .evidence.suite_files import suite_of
from .generation import GENERATED
from .trial import Subject

Item = TypeVar("Item")
#: Under which a process of pytest-xdist finds what was asked of the first one, seed included.
WORKERS_SHARE = "kpt_sample"


@dataclass(frozen=True, slots=True)
class Share:
    """What part is tried.

    Attributes:
        of: above 0, at most 1.
        seed: of the choice.
    """

    of: float
    seed: int

    def __str__(self) -> str:
        return f"{self.of:g}:{self.seed}"

    def chosen(
        self, items: Iterable[Item], stratum: Callable[[Item], Hashable], name: Callable[[Item], str]
    ) -> set[str]:
        """Names of a random share of items, at least one of each stratum.

        Args:
            items: to choose from; their order does not count.
            stratum: what an item is one of: a check of a kernel.
            name: tells items apart.
        """
        strata: dict[Hashable, list[str]] = {}
        for item in items:
            strata.setdefault(stratum(item), []).append(name(item))
        found: set[str] = set()
        for key in sorted(strata, key=str):
            names = sorted(strata[key])
            generator = random.Random(f"{self.seed} {key}")
            found.update(generator.sample(names, math.ceil(self.of * len(names))))
        return found


def parse_share(text: str) -> Share:
    """`0.1`, or `0.1:1234` with the seed of an earlier run.

    Raises:
        ValueError: it is something else; the message is a sentence.
    """
    share, separator, seed = text.partition(":")
    try:
        of, number = float(share), int(seed) if separator else random.SystemRandom().randrange(2**32)
    except ValueError:
        of, number = math.nan, 0
    if not 0 < of <= 1:
        raise ValueError(f"{text!r} is no share; expected a number above 0 and up to 1, and perhaps a seed: 0.1:1234")
    return Share(of, number)


def fresh(claim: Claim, level: Level, beside: dict[str, str] | None) -> Record | None:
    """A record that proves what this run would: by all four hashes, at its level, on whatever chip of the kind.

    Args:
        claim: the kernel.
        level: that this run would prove.
        beside: what runs beside Python here.
    """
    suite = suite_of(claim, level).hash
    for record in proofs(claim):
        same = beside is None or beside.items() <= record.ran_with.items()
        if record.level is level and record.hashes["suite"] == suite and same:
            return record
    return None


class Sampling:
    """A plugin that leaves out all but a share of the tests of kernels that are proven.

    Args:
        share: what is tried of them.
    """

    def __init__(self, share: Share) -> None:
        self.share = share
        self._proven: dict[Subject, Record | None] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Have processes side by side choose the same: of pytest-xdist."""
        node.workerinput[WORKERS_SHARE] = str(self.share)

    def pytest_report_header(self) -> str:
        """How to try the same again."""
        return f"kpt: of what is proven a share is tried, --kpt-sample={self.share}"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Choose."""
        generated = config.stash.get(GENERATED, {})
        subjects = {
            (cls, name): subject
            for cls, tests in generated.items()
            for made in tests.values()
            for name, subject in made.items()
            if subject is not None and self._record(subject) is not None
        }
        proven = [item for item in items if (getattr(item, "cls", None), _id(item)) in subjects]
        chosen = self.share.chosen(proven, _check, lambda item: item.nodeid)
        left_out = [item for item in proven if item.nodeid not in chosen]
        if left_out:
            without = set(left_out)
            items[:] = [item for item in items if item not in without]
            config.hook.pytest_deselected(items=left_out)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was taken from records, and how to try the same again, which `-q` leaves out above."""
        write = terminalreporter.write_line
        write(self.pytest_report_header())
        for subject, record in self._proven.items():
            if record is None:
                write(f"kpt: {subject} is not proven as it is here: all of its checks were for this run")
            else:
                write(f"kpt: {subject} {record.level.word} on {record.chip}: {self.share.of:.0%} were for this run")

    def _record(self, subject: Subject) -> Record | None:
        if subject.composite:
            return None
        if subject not in self._proven:
            self._proven[subject] = _proof(subject)
        return self._proven[subject]


def _proof(subject: Subject) -> Record | None:
    try:
        claim = claim_of(subject.op.name, subject.target, subject.backend)
        level = level_here(claim)
        record = fresh(claim, level, ran_with(claim))
    except KptError:
        return None
    kind = torch.device("cpu").type if level is Level.INTERPRETED else subject.device.type
    return record if record is not None and record.device == kind else None


def _id(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.id)


def _check(item: pytest.Item) -> tuple[str, str]:
    """The kernel and check of a test."""
    parameters = item.callspec.params  # type: ignore[attr-defined]
    subject = parameters["trial"].subject if "trial" in parameters else parameters["subject"]
    check = next(
        (parameters[name].__name__ for name in ("check", "device_check", "declared") if name in parameters), ""
    )
    return str(subject), check
