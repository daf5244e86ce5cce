"""Run by `python tools/gpu`: no package has to be installed for it."""

import sys
from pathlib import Path


def main() -> int:
    """Run the command with this folder's package importable."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from gpu.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
