"""Compiling many jobs in processes of their own, which a crashing compiler may take down."""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from kpt_core import KptError

from . import tpu
from .declared import Job, TritonProgram, why_not_compiled
from .readings import Reading
from .triton_compiler import compile_triton

#: Longer reports of a compiler are cut.
_LONGEST = 600
#: Mistakes of a declaration or an installation. They say nothing of the chip, so no contract may count on them.
_FAULTS = (KptError, ImportError, AttributeError, NameError)


def compile_all(jobs: Iterable[Job], processes: int) -> Iterator[tuple[Job, Reading | str]]:
    """Compile in parallel; yield each job when it is done, with a sentence if nothing could be learnt of it."""
    with tempfile.TemporaryDirectory(prefix="kpt-aot-") as folder:
        crashed: list[Job] = []
        with _pool(processes, folder) as pool:
            waiting = {pool.submit(_compile, job): job for job in jobs}
            for done in as_completed(waiting):
                if isinstance(done.exception(), BrokenProcessPool):
                    # The job that crashed, and all that were waiting then: only alone can they be told apart.
                    crashed.append(waiting[done])
                else:
                    yield waiting[done], done.result()
        for job in crashed:
            with _pool(1, folder) as pool:
                alone: Future[Reading | str] = pool.submit(_compile, job)
                died = isinstance(alone.exception(), BrokenProcessPool)
                yield job, "the compiler crashed, and took its process with it" if died else alone.result()


def _pool(processes: int, folder: str) -> ProcessPoolExecutor:
    # This process may have threads, so it must not be forked; one that has imported torch and done nothing else may.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    arguments = (folder, dict(os.environ))
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare, initargs=arguments)


#: Of this process: what compilers print, and what libtpu dumps.
_log = Path()
_dump = Path()


def _prepare(folder: str, environment: dict[str, str]) -> None:
    """Make this process one that compiles: nothing of the user's caches is read or written, all output is kept."""
    global _log, _dump
    os.environ.clear()
    os.environ.update(environment)
    _dump, _log = Path(folder, f"tpu-{os.getpid()}"), Path(folder, f"log-{os.getpid()}")
    _dump.mkdir()
    os.environ["TRITON_CACHE_DIR"] = str(Path(folder, "triton"))
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    tpu.prepare(_dump)
    # Compilers of C++ write to the descriptors, not to Python's streams.
    output = os.open(_log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _output() -> str:
    sys.stdout.flush()
    return _log.read_text(errors="replace")


def _compile(job: Job) -> Reading | str:
    os.truncate(_log, 0)
    try:
        program = job.program()
        if isinstance(program, TritonProgram):
            return compile_triton(program, job.chip, job.settings(), _output)
        return tpu.compile_pallas(program, job.chip, job.settings(), _dump)
    except Exception as error:
        # The innermost cause, for the outer ones of Triton quote the whole source.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, _FAULTS) and isinstance(cause, Exception):
            return why_not_compiled(cause)
        return Reading(failure=_reason(cause))


def _reason(cause: BaseException) -> str:
    """What a compiler says, in one line."""
    text = str(getattr(cause, "error_message", None) or cause)
    if "PassManager" in text or not text:
        # MLIR tells the reason on standard error alone.
        text += "".join(f" {line}" for line in _output().splitlines() if "error:" in line)
    text = " ".join(text.split())
    return f"{type(cause).__name__}: {text if len(text) <= _LONGEST else f'{text[:_LONGEST]} [...]'}"
