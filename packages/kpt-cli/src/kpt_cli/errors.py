"""Errors as one sentence."""

import errno
import sys


class CliError(Exception):
    """Wrong input that the command line found by itself, without importing torch, as `kpt_core.KptError` would."""


def sentence(error: BaseException) -> str | None:
    """Return the sentence for an error that is not a bug of this program, None for all others."""
    core = sys.modules.get("kpt_core")  # its errors can't exist before it was imported
    if isinstance(error, CliError) or (core is not None and isinstance(error, core.KptError)):
        return str(error)
    if isinstance(error, OSError):
        return _os_sentence(error)
    torch = sys.modules.get("torch")
    memory = MemoryError if torch is None else (MemoryError, torch.OutOfMemoryError)
    of_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's own allocator's
    if isinstance(error, memory) or of_cpu:
        return f"out of memory: {str(error).splitlines()[0] if str(error) else 'no more RAM'}; try less at a time"
    return None


def _os_sentence(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    path = error.filename2 or error.filename  # of two files, the second is the one that is written
    where = f" ({path})" if path else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full or a size limit was hit{where}: {what}; make room or choose another folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission{where}: {what}; choose a place that you may read and write"
    if error.errno is None:
        return what
    return f"{what}{where}"
