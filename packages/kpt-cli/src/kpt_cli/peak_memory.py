"""The most memory that this process had resident."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def forget_peak() -> None:
    """Begin the peak anew, where the system allows it: loading must not hide what the phase needs."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def peak() -> int:
    """The most bytes that were resident."""
    if _STATUS.exists():
        # Not ru_maxrss, which can't begin anew.
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024
