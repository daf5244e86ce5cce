"""Trying a random share of what records prove, and all of what they don't: a record that was not earned is found."""

import math
import random
from collections.abc import Callable, Generator, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch

from kpt_core import KptError
from kpt_core.evidence import Claim, Level, Record, proofs

from .evidence import claim_of, level_here
from .evidence.provenance import ran_with
from .evidence.suite_files import suite_of
from .generation import GENERATED, by_subject
from .ledger import outcome_of
from .trial import Subject

Item = TypeVar("Item")
#: How much more is tried of a kernel whose record is of another compiler, torch or suite.
ELSEWHERE = 3
#: What says that a native library is another: its sources, and what it was compiled for.
_LIBRARY = ("sources", "isa")
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
        self, items: Iterable[Item], stratum: Callable[[Item], Hashable], name: Callable[[Item], str], times: int = 1
    ) -> set[str]:
        """Names of a random share of items, at least one of each stratum.

        Args:
            items: to choose from; their order does not count.
            stratum: what an item is one of: a check of a kernel.
            name: tells items apart.
            times: how many shares of them.
        """
        strata: dict[Hashable, list[str]] = {}
        for item in items:
            strata.setdefault(stratum(item), []).append(name(item))
        found: set[str] = set()
        for key in sorted(strata, key=str):
            names = sorted(strata[key])
            generator = random.Random(f"{self.seed} {key}")
            found.update(generator.sample(names, min(len(names), math.ceil(self.of * times * len(names)))))
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


@dataclass(frozen=True, slots=True)
class Proof:
    """What a record says of a kernel whose files, and its op's, are still those that were tried.

    Attributes:
        record: of a run at the level of this one, on whatever chip of the kind.
        here: whether all that ran beside Python, and the suite, are those of this run too.
    """

    record: Record
    here: bool


def proof_of(claim: Claim, level: Level, beside: dict[str, str]) -> Proof | None:
    """The nearest proof of what this run would show, or None.

    Args:
        claim: the kernel.
        level: that this run would prove.
        beside: what runs beside Python here.
    """
    suite = suite_of(claim, level).hash
    found = []
    for record in proofs(claim):
        made_alike = all(record.ran_with.get(name) == beside.get(name) for name in _LIBRARY)
        if record.level is level and made_alike:
            same = record.hashes["suite"] == suite and beside.items() <= record.ran_with.items()
            found.append(Proof(record, here=same))
    return max(found, key=lambda proof: proof.here, default=None)


class Sampling:
    """A plugin that leaves out all but a share of the tests of kernels that are proven.

    Args:
        share: what is tried of them.
    """

    def __init__(self, share: Share) -> None:
        self.share = share
        self._proven: dict[Subject, Proof | None] = {}
        self._passed: dict[str, Record] = {}

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
            if subject is not None and self._proof(subject) is not None
        }
        proven = [item for item in items if (getattr(item, "cls", None), _id(item)) in subjects]
        self._note_passed(generated, proven)
        chosen: set[str] = set()
        for here in (True, False):
            tried = [item for item in proven if (proof := self._proof(_subject(item))) and proof.here is here]
            chosen |= self.share.chosen(tried, _check, lambda item: item.nodeid, 1 if here else ELSEWHERE)
        left_out = [item for item in proven if item.nodeid not in chosen]
        if left_out:
            without = set(left_out)
            items[:] = [item for item in items if item not in without]
            config.hook.pytest_deselected(items=left_out)

    def _note_passed(self, generated: Any, items: Iterable[pytest.Item]) -> None:
        """Note of which tests a record says that they passed."""
        told: dict[tuple[Any, str], Record] = {}
        for cls, tests in generated.items():
            for subject, names in by_subject(tests).items():
                proof = self._proof(subject)
                if proof is not None and proof.here:
                    letters = zip(names, proof.record.outcomes, strict=False)
                    told |= {(cls, name): proof.record for name, letter in letters if letter == "p"}
        places = {item.nodeid: (getattr(item, "cls", None), _id(item)) for item in items}
        self._passed = {nodeid: told[place] for nodeid, place in places.items() if place in told}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Fail what its record says that it passed, and it did not here."""
        report = yield
        record = self._passed.get(item.nodeid)
        if record is not None and report.skipped:
            outcome, reason = outcome_of(report)
            report.outcome = "failed"
            report.longrepr = (
                f"this check is {outcome} here ({reason}), and the record of {record.kernel} on {record.chip} says "
                "that it passed: prove the kernel again (`nox -s evidence`)"
            )
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what was taken from records, and how to try the same again, which `-q` leaves out above."""
        write = terminalreporter.write_line
        write(self.pytest_report_header())
        for subject, proof in self._proven.items():
            if proof is None:
                write(f"kpt: {subject} is not proven as it is here: all of its checks were for this run")
                continue
            record, share = proof.record, min(1.0, self.share.of * (1 if proof.here else ELSEWHERE))
            told = f"{record.level.word} on {record.chip}"
            told += "" if proof.here else ", with another compiler, torch or suite"
            write(f"kpt: {subject} {told}: {share:.0%} were for this run")

    def _proof(self, subject: Subject) -> Proof | None:
        if subject.composite:
            return None
        if subject not in self._proven:
            self._proven[subject] = _proof(subject)
        return self._proven[subject]


def _proof(subject: Subject) -> Proof | None:
    try:
        claim = claim_of(subject.op.name, subject.target, subject.backend)
        level = level_here(claim)
        proof = proof_of(claim, level, ran_with(claim))
    except KptError:
        return None
    kind = torch.device("cpu").type if level is Level.INTERPRETED else subject.device.type
    return proof if proof is not None and proof.record.device == kind else None


def _id(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.id)


def _subject(item: pytest.Item) -> Subject:
    parameters = item.callspec.params  # type: ignore[attr-defined]
    subject: Subject = parameters["trial"].subject if "trial" in parameters else parameters["subject"]
    return subject


def _check(item: pytest.Item) -> tuple[str, str]:
    """The kernel and check of a test."""
    parameters = item.callspec.params  # type: ignore[attr-defined]
    check = next(
        (parameters[name].__name__ for name in ("check", "device_check", "declared") if name in parameters), ""
    )
    return str(_subject(item)), check
