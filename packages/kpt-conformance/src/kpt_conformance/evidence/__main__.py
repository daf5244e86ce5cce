"""`python -m kpt_conformance.evidence check|write`: hold the support table to the records, or make it from them."""

import argparse
import sys
from pathlib import Path

from kpt_core import KptError

from .verdict import EVIDENCE, SUPPORT, faults, write


def main(arguments: list[str] | None = None) -> int:
    """Check or write the table; 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m kpt_conformance.evidence", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check", help="say what the table, or a record, claims without proof; 1 if anything does"
    )
    make = commands.add_parser("write", help="make the table from the registry and the records")
    for command in (check, make):
        command.add_argument("--evidence", type=Path, default=EVIDENCE, metavar="DIR", help="of the records")
        command.add_argument("--support", type=Path, default=SUPPORT, metavar="FILE", help="the table")
    make.add_argument("--prune", action="store_true", help="remove stale records, and those of kernels that are gone")
    asked = parser.parse_args(arguments)
    try:
        if asked.command == "check":
            found = faults(asked.evidence, asked.support)
            print("\n".join(found) or f"{asked.support} says what the records in {asked.evidence} prove")
            return 1 if found else 0
        for file in write(asked.evidence, asked.support, prune=asked.prune):
            print(f"removed {file}")
    except (KptError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"wrote {asked.support}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
