"""What a record says and can be looked up: its hashes, commit, date, chip and number of checks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property

import kpt_core
from kpt_conformance.aot.chips import CHIPS
from kpt_core.evidence import Claim, Level, Record

from .counting import Counts
from .history import REWRITTEN, History, history_of_sources
from .provenance import INTERPRETER, is_cpu, made_with_triton
from .suite_files import suite_of

#: Clocks of two machines differ by so much.
_SLACK = timedelta(minutes=10)


@dataclass(frozen=True)
class Verification:
    """One record against what is here.

    Attributes:
        claim: the kernel that it is about.
        record: the record.
        counts: kept for the next record.
    """

    claim: Claim
    record: Record
    counts: Counts = field(default_factory=Counts)

    @cached_property
    def changed(self) -> str | None:
        """What changed since, so that the record proves nothing any more: the kernel or its contract."""
        if self.claim.sources().hash != self.record.hashes["kernel"]:
            return "the kernel"
        if self.claim.contract().hash != self.record.hashes["contract"]:
            return "its op or the op's cases"
        return None

    @cached_property
    def of_present_suite(self) -> bool:
        """Whether it passed the suite as it is today."""
        return suite_of(self.claim, self.record.level).hash == self.record.hashes["suite"]

    def lies(self) -> Iterator[str]:
        """What the record says of a kernel that did not change, and is not so."""
        yield from self._chip()
        yield from self._library()
        yield from self._number()
        yield from self._commit()

    def unknown(self) -> str | None:
        """What could not be looked up here, or None."""
        history = self._history
        if history is None:
            return "git knows nothing of its files here, so its commit was not looked up"
        if history.shallow and self.record.commit and history.date(self.record.commit) is None:
            return "this clone is shallow, so its commit was not looked up"
        if self.record.commit and history.rewritten(self.record.commit):
            return f"their commit is one of {REWRITTEN}, so the files of the present one were looked up instead"
        return None

    @cached_property
    def _history(self) -> History | None:
        return history_of_sources(self.claim.sources())

    def _chip(self) -> Iterator[str]:
        record, claim = self.record, self.claim
        if record.level is Level.COMPILED:
            chips = kpt_core.backends()[claim.backend].chips if claim.offered is not None else ()
            if record.chip not in CHIPS or record.chip not in chips:
                yield f"is compiled for {record.chip!r}, for which {claim.backend} compiles nothing"
        elif record.level is Level.INTERPRETED:
            if record.chip != INTERPRETER or not made_with_triton(claim):
                yield f"is interpreted by {record.chip!r}; only kernels made with Triton are, by {INTERPRETER}"
        elif record.chip in CHIPS or record.chip == INTERPRETER:
            yield f"ran on {record.chip!r}, which is no device"
        elif is_cpu(record.chip) != (record.device == "cpu"):
            yield f"ran on a device of type {record.device} that is called {record.chip!r}"
        elif claim.device_types and record.device not in claim.device_types:
            yield f"ran on {record.chip!r} ({record.device}), and the kernel is for {' or '.join(claim.device_types)}"
        elif made_with_triton(claim) and record.device == "cpu":
            yield f"ran on the CPU {record.chip!r}, where Triton only interprets"

    def _library(self) -> Iterator[str]:
        ran_with = self.record.ran_with
        isa = ran_with.get("isa")
        if isa is not None and not self.record.chip.endswith(f"({isa})"):
            yield f"ran on {self.record.chip!r} with instruction set {isa}"
        backend = kpt_core.backends().get(self.claim.backend)
        native = dict(backend.library()) if backend is not None else {}
        if native and native.get("sources") != ran_with.get("sources"):
            yield "ran with a library of other sources than are here"
        if made_with_triton(self.claim) and "triton" not in ran_with:
            yield "does not say which Triton it ran with"

    def _number(self) -> Iterator[str]:
        if self.of_present_suite:
            expected = self.counts.expected(self.claim, self.record)
            if expected is not None and expected != self.record.total:
                what = "configurations" if self.record.level is Level.COMPILED else "checks"
                yield f"tells of {self.record.total} {what}, and there are {expected}"

    def _commit(self) -> Iterator[str]:
        history, record = self._history, self.record
        if record.when > datetime.now(UTC) + _SLACK:
            yield f"is of {record.date}, which is yet to come"
        if history is None:
            return
        if record.commit is None:
            yield "names no commit; `python -m kpt_conformance.evidence write --take FOLDER` finds that of its files"
            return
        made = history.date(record.commit)
        if made is None:
            if history.rewritten(record.commit):
                yield from self._of_another_head(history, record.commit)
            elif not history.shallow:
                yield (
                    f"names commit {record.commit}, which is not there (if its changes landed under another name, "
                    f"write it and why into {REWRITTEN})"
                )
            return
        if not history.before_head(record.commit):
            yield f"names commit {record.commit}, which did not lead to the present one"
        if record.when < made - _SLACK:
            yield f"is of {record.date}, before its commit {record.commit} was made ({made:%Y-%m-%dT%H:%M:%SZ})"
        differing = history.changed(record.commit, self.claim.sources())
        if differing:
            yield f"names commit {record.commit}, which has another {', '.join(differing[:3])}"
            return
        yield from self._of_another_head(history, record.commit)

    def _of_another_head(self, history: History, commit: str) -> Iterator[str]:
        head = history.head or commit
        differing = history.changed(head, self.claim.sources())
        if differing:  # what a build left is of an earlier commit
            what = ", ".join(differing[:3])
            yield f"is of another {what} than commit {head} has: install the package again, or commit"
