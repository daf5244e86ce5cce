"""Run by `python tools/modelled_tuning`, in an environment with all packages."""

import sys
from pathlib import Path


def main() -> int:
    """Run the command with this folder's package importable."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from modelled_tuning.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
