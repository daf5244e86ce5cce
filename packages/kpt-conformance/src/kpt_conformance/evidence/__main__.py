"""Hold three kinds of files to what is here: records, the ratchet and the support table.

A record says what was proven of one kernel on one chip. The ratchet holds the least level that each kernel must keep
on each chip. The support table, docs/support.md, is made of the records.
"""

import argparse
import sys
from pathlib import Path

from kpt_core import KptError

from .verdict import Place, examine, take, write


def main(arguments: list[str] | None = None) -> int:
    """Check or write; 1 if something is wrong."""
    usual = Place()
    parser = argparse.ArgumentParser(
        prog="python -m kpt_conformance.evidence", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="print what in them is not true; exit code 1 if anything is")
    make = commands.add_parser("write", help="write the table from the records, and raise the ratchet to them")
    for command in (check, make):
        command.add_argument("--support", type=Path, default=usual.support, metavar="FILE", help="the support table")
        command.add_argument("--ratchet", type=Path, default=usual.ratchet, metavar="FILE", help="the ratchet")
    make.add_argument(
        "--prune", action="store_true", help="remove records that prove nothing, and kernels that are gone"
    )
    make.add_argument("--lower", metavar="REASON", help="lower the ratchet to what is proven, for this reason")
    make.add_argument("--take", type=Path, metavar="FOLDER", help="first take records from there, made elsewhere")
    asked = parser.parse_args(arguments)
    if asked.command == "write" and asked.lower is not None and not asked.lower.strip():
        parser.error("--lower needs a reason")
    place = Place(asked.support, asked.ratchet)
    try:
        if asked.command == "check":
            verdict = examine(place)
            for note in verdict.notes:
                print(f"note: {note}")
            print("\n".join(verdict.faults) or f"{place.support} says what the records prove")
            return 1 if verdict.faults else 0
        for file in take(asked.take) if asked.take is not None else ():
            print(f"took {file}")
        for file in write(place, prune=asked.prune, lower=asked.lower):
            print(f"removed {file}")
    except (KptError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"wrote {place.support} and {place.ratchet}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
