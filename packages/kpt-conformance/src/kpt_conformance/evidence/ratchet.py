"""The ratchet: the least level that each kernel must keep on each chip, so that proofs do not get lost unseen."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kpt_core.evidence import Claim, EvidenceError, Level, Record
from kpt_core.evidence.record import now
from kpt_core.files import write_whole

from .history import history_of

FORMAT = "kpt-ratchet-1"
Levels = dict[str, dict[str, Level]]
"""Identity of a kernel -> chip -> level."""


@dataclass(frozen=True, slots=True)
class Ratchet:
    """The file.

    Attributes:
        kernels: every kernel that is known, with the least level on each chip; none for what is merely claimed.
        lowered: what was lowered: kernel, chip, `was`, `now`, reason and date.
    """

    kernels: Levels = field(default_factory=dict)
    lowered: tuple[Mapping[str, str], ...] = ()

    def dumps(self) -> str:
        """The file's text."""
        levels = {
            kernel: {chip: level.word for chip, level in sorted(chips.items())}
            for kernel, chips in sorted(self.kernels.items())
        }
        document = {"format": FORMAT, "kernels": levels, "lowered": [dict(each) for each in self.lowered]}
        return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def read_ratchet(file: Path) -> Ratchet:
    """Read the file; empty if it is not there.

    Raises:
        EvidenceError: it is no ratchet.
    """
    if not file.is_file():
        return Ratchet()
    return _loads(file.read_text(encoding="utf-8"), file)


def levels_of(claims: Iterable[Claim], proven: Iterable[Record]) -> Levels:
    """What is proven of each kernel that there is."""
    levels: Levels = {claim.identity: {} for claim in claims}
    for record in proven:
        levels["/".join(record.key)][record.chip] = record.level
    return levels


def ratchet_faults(file: Path, levels: Levels) -> Iterator[str]:
    """What is proven less than it has to be, and what the file does not know.

    Args:
        file: the ratchet.
        levels: as `levels_of` gives them.

    Raises:
        EvidenceError: the file is no ratchet.
    """
    write = "`python -m kpt_conformance.evidence write"
    if not file.is_file():
        yield f"{file} is not there; take it from the repository, or make one with {write}`"
        return
    ratchet = read_ratchet(file)
    for kernel, chips in levels.items():
        if kernel not in ratchet.kernels:
            yield f"{file} lacks {kernel}; {write}` adds it"
            continue
        for chip, level in chips.items():
            if level > ratchet.kernels[kernel].get(chip, Level.CLAIMED):
                yield f"{file} does not hold {kernel} to {level.word} on {chip}, which is proven; {write}` does"
    for kernel, chips in ratchet.kernels.items():
        if kernel not in levels:
            yield f"{file} has {kernel}, which nothing offers: install its package, or {write} --prune`"
            continue
        for chip, least in chips.items():
            level = levels[kernel].get(chip, Level.CLAIMED)
            if level < least:
                yield (
                    f"{kernel} was {least.word} on {chip} and is {level.word} now: prove it again (`nox -s evidence`), "
                    f'or say why not with {write} --lower "reason"`'
                )
    yield from _lowered_silently(file, ratchet)


def raised(ratchet: Ratchet, levels: Levels, *, prune: bool, lower: str | None) -> Ratchet:
    """The ratchet after what was proven.

    Args:
        ratchet: as it is.
        levels: as `levels_of` gives them.
        prune: leave out kernels that are gone.
        lower: why what is no longer proven is let go; None keeps it.
    """
    kernels: Levels = {}
    lowered = list(ratchet.lowered)
    for kernel in sorted({*ratchet.kernels, *levels}):
        before, here = ratchet.kernels.get(kernel, {}), levels.get(kernel)
        if here is None:
            if not prune:
                kernels[kernel] = before
            continue
        kernels[kernel] = {chip: max(level, before.get(chip, level)) for chip, level in here.items()}
        for chip, least in before.items():
            level = here.get(chip, Level.CLAIMED)
            if level >= least:
                continue
            if lower is None:
                kernels[kernel][chip] = least
                continue
            entry = {"kernel": kernel, "chip": chip, "was": least.word, "now": level.word}
            lowered.append(entry | {"reason": lower, "date": now()})
            if level is not Level.CLAIMED:
                kernels[kernel][chip] = level
    return Ratchet(kernels, tuple(lowered))


def write_ratchet(file: Path, ratchet: Ratchet) -> None:
    """Write the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, ratchet.dumps())


def _lowered_silently(file: Path, ratchet: Ratchet) -> Iterator[str]:
    """What an earlier commit asked for and this file does not, without a word."""
    history = history_of(file.resolve().parent)
    told = set()
    for text in history.versions(file) if history is not None else ():
        try:
            before = _loads(text, file)
        except EvidenceError:
            continue
        said = {(each["kernel"], each["chip"]) for each in ratchet.lowered if each not in before.lowered}
        for kernel, chips in before.kernels.items():
            for chip, least in chips.items():
                now_asked = ratchet.kernels.get(kernel, {}).get(chip, Level.CLAIMED)
                place = (kernel, chip)
                if kernel in ratchet.kernels and now_asked < least and place not in said and place not in told:
                    told.add(place)
                    yield (
                        f"{file} asked for {least.word} of {kernel} on {chip} in an earlier commit and does not any "
                        'more: take that back, or say why with `python -m kpt_conformance.evidence write --lower "..."`'
                    )


def _loads(text: str, file: Path) -> Ratchet:
    try:
        document: Any = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"format is {document['format']!r}; expected {FORMAT!r}")
        kernels = {
            str(kernel): {str(chip): Level[word.upper()] for chip, word in chips.items()}
            for kernel, chips in document["kernels"].items()
        }
        lowered = tuple({str(name): str(value) for name, value in each.items()} for each in document["lowered"])
        if any(not {"kernel", "chip", "reason"} <= each.keys() for each in lowered):
            raise ValueError("lowered needs kernel, chip and reason")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvidenceError(f"{file} is no ratchet ({error}); take it from the repository again") from None
    return Ratchet(kernels, lowered)
