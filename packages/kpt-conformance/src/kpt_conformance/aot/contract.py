"""The contract of a kernel and a chip: readable text, parsed strictly, checked against what was read.

Examples: `wgmma, no spills, smem <= 227 KiB`; `v_mfma of fp8, no v_mfma of f16, registers <= 256, occupancy >= 8`;
`unsupported: fp8 e4m3fn needs sm89`; `not offered: needs wgmma`.
"""

import difflib
import re
from dataclasses import dataclass

from kpt_core import InputError

from .chips import KIB, Chip
from .readings import FAMILIES, Reading, count

_UNITS = {"B": 1, "KiB": KIB, "MiB": KIB * KIB}
_BOUND = re.compile(r"(?P<name>[a-z]+) *(?P<sign><=|>=) *(?P<number>\d+) *(?P<unit>[A-Za-z]*)")
_INSTRUCTION = re.compile(r"(?P<no>no )?(?P<family>\S+)(?: of (?P<type>\w+))?")


class ContractError(InputError):
    """A contract can't be read; the message names the clause and what would be understood."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """The code has (or has not) an instruction of a family."""

    chip: Chip
    family: str
    of_type: str | None
    wanted: bool

    def breach(self, reading: Reading) -> str | None:
        """Return what is wrong, or None."""
        number = count(self.chip.vendor, self.family, reading.instructions, self.of_type)
        name = self.family + (f" of {self.of_type}" if self.of_type else "")
        if not self.wanted:
            return f"{number} {name} in the code, none was allowed" if number else None
        if not number:
            found = ", ".join(reading.instructions) or "none of those a contract may name"
            return f"no {name} in the code; found: {found}"
        return next((note for note in reading.notes if self.family in note and "serialized" in note), None)


@dataclass(frozen=True, slots=True)
class Bound:
    """A number of the reading is at most, or at least, a limit."""

    clause: str
    field: str
    at_most: bool
    limit: int

    def breach(self, reading: Reading) -> str | None:
        """Return what is wrong, or None."""
        value: int | None = getattr(reading, self.field)
        if value is None:
            return f"{self.clause!r} can't be checked: the compiler does not tell {self.field}"
        if value <= self.limit if self.at_most else value >= self.limit:
            return None
        shown = {"shared_memory": f"{value / KIB:.1f} KiB", "spills": f"{value} B of spills"}
        shown["hot"] = f"{value} B of spills in the shortest loop of products"
        return f"{shown.get(self.field, f'{self.field} {value}')}, but the contract says {self.clause!r}"


@dataclass(frozen=True, slots=True)
class Contract:
    """What one kernel's code for one chip must be.

    Attributes:
        text: as declared.
        clauses: what is checked, each with `breach(reading)`.
        unsupported: why it does not compile for this chip; None if it must compile.
        not_offered: why it is not compiled for this chip at all; None if it is.
    """

    text: str
    clauses: tuple[Instruction | Bound, ...] = ()
    unsupported: str | None = None
    not_offered: str | None = None

    def breaches(self, reading: Reading) -> list[str]:
        """Return what the code does not keep, a sentence each."""
        return [breach for clause in self.clauses if (breach := clause.breach(reading)) is not None]


def parse_contract(text: str, chip: Chip) -> Contract:
    """Read a contract; the chip decides which instructions and which memory there are.

    Raises:
        ContractError: a clause is not understood, or the contract asks for nothing.
    """
    if (reason := _reason("unsupported", text, chip)) is not None:
        return Contract(text, unsupported=reason)
    if (reason := _reason("not offered", text, chip)) is not None:
        return Contract(text, not_offered=reason)
    return Contract(text, tuple(_parse_clause(clause.strip(), chip) for clause in text.split(",")))


def _reason(keyword: str, text: str, chip: Chip) -> str | None:
    if not text.strip().startswith(keyword):
        return None
    reason = text.strip().removeprefix(keyword).removeprefix(":").strip()
    if not reason:
        raise ContractError(f"contract {text!r} for {chip.name} gives no reason; write '{keyword}: reason'")
    return reason


def _parse_clause(clause: str, chip: Chip) -> Instruction | Bound:
    if clause == "no spills":
        return Bound(clause, "spills", at_most=True, limit=0)
    if bound := _BOUND.fullmatch(clause):
        return _parse_bound(clause, bound, chip)
    instruction = _INSTRUCTION.fullmatch(clause)
    families = FAMILIES[chip.vendor]
    if instruction is None or instruction["family"] not in families:
        known = [*families, *(f"no {family}" for family in families), "no spills", *_bounds(chip)]
        near = difflib.get_close_matches(clause, known, n=1)
        offer = f"did you mean {near[0]!r}? " if near else ""
        raise ContractError(
            f"{clause!r} is no clause of a contract for {chip.name}; {offer}Known: {', '.join(families)} (each also as "
            f"'no NAME', or as 'NAME of TYPE'), no spills, {', '.join(_bounds(chip))}, 'unsupported: reason' and "
            "'not offered: reason'"
        )
    return Instruction(chip, instruction["family"], instruction["type"], wanted=not instruction["no"])


def _bounds(chip: Chip) -> tuple[str, ...]:
    memory = ("spills <= N B", f"{chip.memory_word} <= N KiB")
    if chip.vendor == "intel":
        return (memory[1],)
    if chip.vendor == "tpu":
        return memory
    hot = ("hot <= N B",) if chip.vendor == "nvidia" else ()
    return ("registers <= N", *memory, *hot, "occupancy >= N")


def _parse_bound(clause: str, match: re.Match[str], chip: Chip) -> Bound:
    name, sign, unit = match["name"], match["sign"], match["unit"]
    if f"{name} {sign}" not in {" ".join(bound.split()[:2]) for bound in _bounds(chip)}:
        raise ContractError(
            f"{clause!r} is no bound of a contract for {chip.name}, where there are {', '.join(_bounds(chip))}"
        )
    in_bytes = name in ("spills", "hot", chip.memory_word)
    if in_bytes != (unit in _UNITS) or (unit and not in_bytes):
        expected = f"one of {', '.join(_UNITS)} behind the number" if in_bytes else "no unit"
        raise ContractError(f"{clause!r} in a contract for {chip.name}: expected {expected}; got {unit or 'none'!r}")
    field = "shared_memory" if name == chip.memory_word else name
    return Bound(clause, field, at_most=sign == "<=", limit=int(match["number"]) * _UNITS.get(unit, 1))
