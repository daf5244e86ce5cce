"""Run the C++ tests of the native kernels for every instruction set that this machine has.

Each is tested twice: compiled with AddressSanitizer and UndefinedBehaviorSanitizer, tensors lying in memory of exactly
their size; and the library as it ships, tensors ending, then beginning, at a page that may not be touched, since
instructions with masks are not all seen by the sanitizers.
"""

import argparse
import ctypes
import importlib.util
import os
import re
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


def main() -> int:
    """Compile, run and tell; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--if-compiler", action="store_true", help="succeed where there is no C++ compiler")
    asked = parser.parse_args()
    build = _build_hook()
    compiler, reason = build.find_compiler()
    if not compiler:
        print(f"The native kernels are not tested: {reason}.")
        return 0 if asked.if_compiler else 1
    left_out = build.build(NATIVE, LIBRARIES)
    if "baseline" in left_out:
        print(f"The native kernels are not tested: {left_out['baseline']}.")
        return 1
    sets = [name for name in _of_this_machine() if name not in left_out]
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
                [folder / "plain", LIBRARIES / f"kpt_cpu_{each}.so", place],
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


def _of_this_machine() -> list[str]:
    baseline = ctypes.CDLL(str(LIBRARIES / "kpt_cpu_baseline.so"))
    baseline.kpt_cpu_instruction_sets.restype = ctypes.c_char_p
    told: bytes = baseline.kpt_cpu_instruction_sets()
    return told.decode().split()


def _compile(compiler: list[str], build: Any, sets: Iterable[str], folder: Path) -> None:
    """Make `<instruction set>.so`, sanitized, and the test program, `sanitized` and `plain`."""
    kernel_flags = [flag for flag in build.FLAGS if flag not in ("-O3", "-shared")]
    of_tests = ["-std=c++17", "-pthread", "-g1", "-Wall", "-Wextra", f"-I{NATIVE}", f"-I{TESTS}"]
    groups = {
        **{each: (NATIVE, ["-O1", "-g1", *kernel_flags, *SANITIZERS, *build.INSTRUCTION_SETS[each]]) for each in sets},
        "sanitized": (TESTS, ["-O1", *of_tests, *SANITIZERS]),
        # The loops that check are most of its time.
        "plain": (TESTS, ["-O2", *of_tests]),
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


def _run(run: tuple[str, list[Path | str], dict[str, str]]) -> bool:
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
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as late:
        told = (late.stdout or b"").decode(errors="replace")
        print(f"{name}: no end after {SECONDS} s\n{told}", flush=True)
        return False
    cases = sum(int(number) for number in re.findall(r"(\d+) cases", done.stdout))
    if done.returncode == 0 and cases > 0:
        print(f"{name}: {cases} cases in {time.monotonic() - start:.0f} s", flush=True)
        return True
    print(f"{name}: exit status {done.returncode}\n{done.stdout}", flush=True)
    return False


if __name__ == "__main__":
    sys.exit(main())
