"""Where the demo may write: checked before any work."""

import json
import shutil
from pathlib import Path

from kpt_cli.errors import CliError
from kpt_cli.output_file import check_writable

REPORT = "report.json"
#: What report.json says it is, by which an earlier demo is recognised.
KIND = "kpt demo"


def check_output(output: Path, disk_bytes: int) -> Path:
    """Check that the demo can write to a folder; return its real path.

    Args:
        output: a folder that does not exist, is empty, or holds an earlier demo.
        disk_bytes: that are needed.

    Raises:
        CliError: it is a file, somebody else's folder, in a wrong place, or the disk has no room.
    """
    real = output.resolve()
    if real.exists() and not real.is_dir():
        raise CliError(f"--output {output} is a file; expected a folder that is new, empty or of an earlier demo")
    if real.is_dir() and any(real.iterdir()) and not is_demo(real):
        raise CliError(f"--output {output} is not empty and holds no earlier demo; choose another folder")
    parent = real.parent
    if not parent.is_dir():
        raise CliError(f"--output {output}: {parent} is no folder; make it first")
    check_writable(parent, f"--output {output}")
    free = shutil.disk_usage(parent).free
    if free < disk_bytes:
        raise CliError(
            f"--output {output} needs {disk_bytes / 2**20:.0f} MiB and the disk has {free / 2**20:.0f} MiB free; make "
            "room or choose another disk"
        )
    return real


def is_demo(folder: Path) -> bool:
    """Whether a folder was written by an earlier demo."""
    try:
        document = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("kind") == KIND
