"""Run the C++ tests of the native kernels for every instruction set that this machine has.

Each is tested twice: compiled with AddressSanitizer and UndefinedBehaviorSanitizer, tensors lying in memory of exactly
their size; and the library as it ships, tensors ending, then beginning, at a page that may not be touched, since
instructions with masks are not all seen by the sanitizers.

With `--under "qemu-aarch64 -L /usr/aarch64-linux-gnu"` and KPT_CPU_TARGET=aarch64 an emulator tests the library as it
ships alone.
"""

import argparse
import ctypes
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PACKAGE = TESTS.parents[1]
NATIVE = PACKAGE / "native"
LIBRARIES = PACKAGE / "src" / "kpt_backend_cpu" / "libraries"

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
#: What is not initialised is NaN.
SANITIZED = {
    "ASAN_OPTIONS": "malloc_fill_byte=255:max_malloc_fill_size=1000000000:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
#: What is not initialised is far too large.
SHIPPED = {"MALLOC_PERTURB_": "1"}
SECONDS = 600
#: As much slower as an emulator may be.
SLOWER = 4


def main() -> int:
    """Compile, run and tell; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--if-compiler", action="store_true", help="succeed where there is no C++ compiler")
    parser.add_argument(
        "--libraries", type=Path, default=LIBRARIES, metavar="FOLDER", help="where they are compiled to"
    )
    parser.add_argument(
        "--under", type=shlex.split, default=[], metavar="COMMAND", help="an emulator that runs the tests"
    )
    asked = parser.parse_args()
    build = _build_hook()
    if build.target() != build.own_architecture() and not asked.under:
        parser.error(f"this machine runs no {build.target()}: name an emulator, as in --under 'qemu-{build.target()}'")
    compiler, reason = build.find_compiler()
    if not compiler:
        print(f"The native kernels are not tested: {reason}.")
        return 0 if asked.if_compiler else 1
    start = time.monotonic()
    libraries: Path = asked.libraries
    libraries.mkdir(parents=True, exist_ok=True)
    left_out = build.build(NATIVE, libraries)
    if "baseline" in left_out:
        print(f"The native kernels are not tested: {left_out['baseline']}.")
        return 1
    print(f"The libraries for {build.target()} are there after {time.monotonic() - start:.0f} s.", flush=True)
    if asked.under:
        return _emulated(compiler, build, libraries, asked.under)
    sets = [name for name in _of_this_machine(libraries) if name not in left_out]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.monotonic()
        _compile(compiler, build, sets, folder)
        print(f"Compiled with {' '.join(SANITIZERS)} for {', '.join(sets)} in {time.monotonic() - start:.0f} s.")
        runs = [
            (f"{each}, sanitized", [folder / "sanitized", folder / f"{each}.so", "exact"], SANITIZED) for each in sets
        ] + [
            (
                f"{each} as it ships, pages that {side} it closed",
                [folder / "plain", libraries / f"kpt_cpu_{each}.so", place],
                SHIPPED,
            )
            for each in sets
            for place, side in (("end", "follow"), ("begin", "precede"))
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            passed = list(pool.map(_run, runs))
    return 0 if all(passed) else 1


def _build_hook() -> Any:
    """The module that compiles the libraries when the package is installed."""
    spec = importlib.util.spec_from_file_location("hatch_build", PACKAGE / "hatch_build.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"{PACKAGE / 'hatch_build.py'} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _emulated(compiler: list[str], build: Any, libraries: Path, emulator: list[str]) -> int:
    """Test the baseline as it ships by an emulator, which need not have more than that; the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _compile(compiler, build, (), folder, ("plain",))
        run: list[Path | str] = [*emulator, folder / "plain", libraries / "kpt_cpu_baseline.so", "end"]
        told = f"{build.target()} baseline as it ships, under {emulator[0]}, pages that follow it closed"
        return 0 if _run((told, run, {}), SECONDS * SLOWER) else 1


def _of_this_machine(libraries: Path) -> list[str]:
    baseline = ctypes.CDLL(str(libraries / "kpt_cpu_baseline.so"))
    baseline.kpt_cpu_instruction_sets.restype = ctypes.c_char_p
    told: bytes = baseline.kpt_cpu_instruction_sets()
    return told.decode().split()


def _compile(
    compiler: list[str],
    build: Any,
    sets: Iterable[str],
    folder: Path,
    programs: Iterable[str] = ("sanitized", "plain"),
) -> None:
    """Make `<instruction set>.so`, sanitized, and the test program, `sanitized` and `plain`."""
    kernel_flags = [flag for flag in build.FLAGS if flag != "-O3"]
    flags_of = build.instruction_sets()
    of_tests = ["-std=c++17", "-pthread", "-g1", "-Wall", "-Wextra", f"-I{NATIVE}", f"-I{TESTS}"]
    # The loops that check are most of the time of the plain program.
    flags_of_program = {"sanitized": ["-O1", *of_tests, *SANITIZERS], "plain": ["-O2", *of_tests]}
    groups = {
        **{each: (NATIVE, ["-O1", "-g1", *kernel_flags, *SANITIZERS, *flags_of[each]]) for each in sets},
        **{program: (TESTS, flags_of_program[program]) for program in programs},
    }
    objects: dict[str, list[Path]] = {name: [] for name in groups}
    jobs = list[tuple[int, list[str]]]()
    for name, (sources, flags) in groups.items():
        for source in sources.glob("*.cpp"):
            target = folder / f"{name}.{source.stem}.o"
            objects[name].append(target)
            command = [*compiler, *flags, "-c", str(source), "-o", str(target)]
            jobs.append((source.stat().st_size * len(flags), command))
    jobs.sort(reverse=True)  # what takes long starts early
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_must_work, (command for _, command in jobs)))
    for name, made in objects.items():
        is_library = name not in ("sanitized", "plain")
        how = [] if name == "plain" else [*SANITIZERS]
        # The program replaces functions that the libraries call.
        how += ["-shared"] if is_library else ["-rdynamic"]
        target = folder / (f"{name}.so" if is_library else name)
        _must_work([*compiler, *how, "-pthread", *map(str, made), "-o", str(target), *([] if is_library else ["-ldl"])])


def _must_work(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")


def _run(run: tuple[str, list[Path | str], dict[str, str]], seconds: int = SECONDS) -> bool:
    """Run the test program and print how it ended."""
    name, command, environment = run
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as late:
        told = (late.stdout or b"").decode(errors="replace")
        print(f"{name}: no end after {seconds} s\n{told}", flush=True)
        return False
    cases = sum(int(number) for number in re.findall(r"(\d+) cases", done.stdout))
    if done.returncode == 0 and cases > 0:
        print(f"{name}: {cases} cases in {time.monotonic() - start:.0f} s", flush=True)
        return True
    print(f"{name}: exit status {done.returncode}\n{done.stdout}", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())
