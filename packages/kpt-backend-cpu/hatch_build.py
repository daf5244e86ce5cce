"""Compile the native kernels while the package is built, one library for each instruction set.

An install never fails for want of a compiler: the package is then pure Python, and says why it has no libraries.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if sys.platform != "win32":
    import fcntl

#: "0" skips compiling.
KPT_CPU_BUILD = "KPT_CPU_BUILD"

#: A folder of libraries that were compiled before: of the same sources, in the same way, they are taken from there.
KPT_CPU_BUILT = "KPT_CPU_BUILT"

FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)
#: The C++ runtime is linked by default; as nothing of it is used, this leaves it out.
LINKING = (
    ("-Wl,-dead_strip_dylibs",)
    if platform.system() == "Darwin"
    else ("-static-libgcc", "-Wl,--as-needed", "-Wl,-z,defs")
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *_AVX2)
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vbmi", "-mavx512vbmi2")
#: What an instruction set is compiled with; each machine runs some.
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {"baseline": ()}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTION_SETS |= {
        "avx2": _AVX2,
        "avx512": _AVX512,
        "avx512_bf16": _AVX512_BF16,
        "amx_bf16": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    }
_AGAIN = "then install kpt-backend-cpu again"


class NativeLibraries(BuildHookInterface[Any]):
    """The hook that hatchling calls before it collects the files of a wheel, an editable one too."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform in the wheel's tag if there is something to run on one."""
        root = Path(self.root)
        left_out = build(root / "native", root / "src" / "kpt_backend_cpu" / "libraries")
        for name, reason in left_out.items():
            self.app.display_warning(f"kpt-backend-cpu is built without {name}: {reason}")
        if "baseline" not in left_out:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"


def platform_tag() -> str:
    """The platform of a wheel whose libraries were compiled here."""
    name = sysconfig.get_platform().replace("universal2", platform.machine())
    return name.replace("-", "_").replace(".", "_")


def build(sources: Path, libraries: Path) -> dict[str, str]:
    """Make `kpt_cpu_<instruction set>.so` of the sources, or `missing.txt` with the reason why there is none.

    What was compiled before from the same sources, in the same way, stays. `manifest.json` names the compiler.

    Returns:
        The instruction sets without a library, and why: those whose flags the compiler does not know, or all of them.
    """
    libraries.mkdir(exist_ok=True)
    with _alone_in(libraries):
        return _build(sources, libraries)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One build at a time: another one of the same source waits, and then finds everything made."""
    if sys.platform == "win32":
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def _build(sources: Path, libraries: Path) -> dict[str, str]:
    before = _read(libraries / "built.json")
    compiler, reason = find_compiler()
    left_out, built = dict.fromkeys(INSTRUCTION_SETS, reason), dict[str, str]()
    if compiler:
        left_out, built = _compile_all(compiler, sources, libraries, before)
    if "baseline" in left_out:
        # It is the one that tells what a machine runs.
        left_out, built = dict.fromkeys(INSTRUCTION_SETS, left_out["baseline"]), {}
    for library in libraries.glob("*.so"):
        if library.stem.removeprefix("kpt_cpu_") not in built:
            library.unlink(missing_ok=True)
    missing = libraries / "missing.txt"
    if built:
        missing.unlink(missing_ok=True)
    else:
        missing.write_text(left_out["baseline"] + "\n")
    (libraries / "built.json").write_text(json.dumps(built, indent=2) + "\n")
    told = _version(compiler).splitlines() if built else []
    manifest = {"compiler": told[0].strip() if told else ""}
    (libraries / "manifest.json").write_text(json.dumps(manifest) + "\n")
    return left_out


def _files(sources: Path) -> list[Path]:
    return sorted([*sources.glob("*.cpp"), *sources.glob("*.h")])


def find_compiler() -> tuple[list[str], str]:
    """The command of a C++ compiler, or none and the sentence that says so."""
    if os.environ.get(KPT_CPU_BUILD) == "0":
        return [], f"it was installed with {KPT_CPU_BUILD}=0, which skips compiling: unset it, {_AGAIN}"
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:
        if shutil.which(asked[0]):
            return asked, ""
        return [], f"CXX names {asked[0]!r}, which is no program: set it to a C++ compiler or unset it, {_AGAIN}"
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name], ""
    return [], (
        "no C++ compiler was found when it was installed (c++, g++ and clang++ were looked for): install one, for "
        f"instance with `apt install g++`, {_AGAIN}"
    )


def _compile_all(
    compiler: list[str], sources: Path, libraries: Path, before: dict[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Why some have no library, and a digest of what each of the others was made of."""
    files = sorted(sources.glob("*.cpp"))
    digest = hashlib.sha256(repr((compiler, _version(compiler), platform_tag())).encode())
    for path in _files(sources):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())

    other = Path(os.environ.get(KPT_CPU_BUILT) or libraries)
    built_there = _read(other / "built.json")

    def one(name: str) -> tuple[str, str]:
        flags = (*FLAGS, *INSTRUCTION_SETS[name])
        made_of = hashlib.sha256(digest.digest() + repr((flags, LINKING)).encode()).hexdigest()
        library = libraries / f"kpt_cpu_{name}.so"
        if before.get(name) == made_of and library.exists():
            return made_of, ""
        if built_there.get(name) == made_of and (other / library.name).exists():
            shutil.copy2(other / library.name, library)
            return made_of, ""
        return made_of, _compile([*compiler, *flags, *map(str, files), *LINKING], library)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = dict(zip(INSTRUCTION_SETS, pool.map(one, INSTRUCTION_SETS), strict=True))
    left_out = {name: reason for name, (_, reason) in results.items() if reason}
    return left_out, {name: made_of for name, (made_of, _) in results.items() if name not in left_out}


def _compile(command: list[str], library: Path) -> str:
    """Write a library at once, so that no process sees half of it; the reason if that fails."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        try:
            done = subprocess.run(
                [*command, "-o", str(made)], capture_output=True, text=True, errors="replace", check=False
            )
        except OSError as error:
            return f"the C++ compiler {command[0]} does not start ({error}): mend it, {_AGAIN}"
        if done.returncode != 0 or not made.exists():
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            told = lines[0].strip() if lines else f"exit status {done.returncode}"
            return f"the C++ compiler {command[0]} failed ({told}): mend that or set CXX to another one, {_AGAIN}"
        made.replace(library)
    return ""


def _version(compiler: list[str]) -> str:
    try:
        told = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return ""
    return told.stdout


def _read(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return read
