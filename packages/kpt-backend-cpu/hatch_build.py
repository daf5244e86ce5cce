"""Compile the native kernels while the package is built, one library for each instruction set.

An install never fails for want of a compiler: the package is then pure Python, and says why it has no libraries.
"""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if sys.platform != "win32":
    import fcntl

#: "0" skips compiling.
KPT_CPU_BUILD = "KPT_CPU_BUILD"

#: A folder of libraries that were compiled before: of the same sources, in the same way, they are taken from there.
KPT_CPU_BUILT = "KPT_CPU_BUILT"

#: The architecture to compile for, `aarch64` or `x86_64`; the machine's own if unset. On macOS ARCHFLAGS tells it too.
KPT_CPU_TARGET = "KPT_CPU_TARGET"

#: Variables whose options are used beside ours, as build tools do: before ours, so that ours decide.
CXXFLAGS, CPPFLAGS, LDFLAGS, ARCHFLAGS = "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "ARCHFLAGS"

FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
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
#: What the libraries of an architecture are compiled with; each machine runs some. NEON is in ARM's baseline.
_INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "baseline": (),
        "avx2": _AVX2,
        "avx512": _AVX512,
        "avx512_bf16": _AVX512_BF16,
        "amx_bf16": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    },
    "aarch64": {"baseline": ()},
}
_OTHER_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}
#: Options of processors (-m...) that leave the instructions as they are. Every other one would make a baseline none.
_HARMLESS = re.compile(
    "-m(64|llvm|(tune|cmodel|macosx-version-min|branch-protection|indirect-branch|function-return)=.*|"
    "(no-)?(red-zone|omit-leaf-frame-pointer|stackrealign|indirect-branch-register))"
)
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
            for sentence in ignored_options():
                self.app.display_warning(sentence)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"


def own_architecture() -> str:
    """Return the architecture of this machine."""
    return _usual_name(platform.machine())


def target() -> str:
    """Return the architecture that is compiled for."""
    asked = _asked_architectures()
    return asked[0] if asked else own_architecture()


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Return the flags of each instruction set that has a library, by its name."""
    return _INSTRUCTION_SETS.get(target(), {"baseline": ()})


def platform_tag() -> str:
    """Return the platform of a wheel whose libraries are compiled here."""
    name = sysconfig.get_platform().replace("universal2", platform.machine())
    if target() != own_architecture():
        apple = platform.system() == "Darwin" and target() == "aarch64"
        name = f"{name.rpartition('-')[0]}-{'arm64' if apple else target()}"
    return name.replace("-", "_").replace(".", "_")


def ignored_options() -> list[str]:
    """Return a sentence for each option of CXX, CXXFLAGS or CPPFLAGS that is left out: a baseline runs everywhere."""
    return [
        f"kpt-backend-cpu is compiled without {option!r} of {variable}: it would decide which processors run the "
        f"library, and there is one for each instruction set ({', '.join(instruction_sets())}), chosen where it runs"
        for variable in ("CXX", CXXFLAGS, CPPFLAGS)
        for option in _options(variable)
        if _selects_instructions(option)
    ]


def _usual_name(machine: str) -> str:
    return _OTHER_NAMES.get(machine.lower(), machine.lower())


def _asked_architectures() -> list[str]:
    """Return what KPT_CPU_TARGET names, or on macOS what ARCHFLAGS does; nothing where neither is set."""
    if asked := os.environ.get(KPT_CPU_TARGET, "").strip():
        return [_usual_name(asked)]
    if platform.system() != "Darwin":
        return []
    flags = _options(ARCHFLAGS)
    return [_usual_name(name) for flag, name in pairwise(flags) if flag == "-arch"]


def _why_no_target() -> str:
    """Return the sentence that refuses what is asked to be compiled for, "" where there is nothing to refuse."""
    asked = _asked_architectures()
    if len(set(asked)) > 1:
        return (
            f"{ARCHFLAGS} is {os.environ[ARCHFLAGS]!r}, and a library is for one architecture: name one, and build "
            f"a wheel for each, {_AGAIN}"
        )
    if asked and asked[0] not in _INSTRUCTION_SETS:
        variable = KPT_CPU_TARGET if os.environ.get(KPT_CPU_TARGET, "").strip() else ARCHFLAGS
        return (
            f"{variable} is {os.environ[variable]!r}; {' or '.join(sorted(_INSTRUCTION_SETS))} was expected: "
            f"set it to one of them or unset it, {_AGAIN}"
        )
    return ""


def _options(variable: str) -> list[str]:
    return shlex.split(os.environ.get(variable, ""))


def _selects_instructions(option: str) -> bool:
    return option.startswith("-m") and _HARMLESS.fullmatch(option) is None


def _kept(options: list[str]) -> list[str]:
    return [option for option in options if not _selects_instructions(option)]


def build(sources: Path, libraries: Path) -> dict[str, str]:
    """Make `kpt_cpu_<instruction set>.so` of the sources, or `missing.txt` with the reason why there is none.

    What was compiled before from the same sources, in the same way, stays: libraries, and in `objects/` what they were
    linked of. `manifest.json` names the compiler.

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
    names = instruction_sets()
    left_out, built = dict.fromkeys(names, reason), dict[str, str]()
    if compiler:
        left_out, built = _compile_all(compiler, sources, libraries, before)
    if "baseline" in left_out:
        # It is the one that tells what a machine runs.
        left_out, built = dict.fromkeys(names, left_out["baseline"]), {}
    for library in libraries.glob("*.so"):
        if library.stem.removeprefix("kpt_cpu_") not in built:
            library.unlink(missing_ok=True)
    missing = libraries / "missing.txt"
    if built:
        missing.unlink(missing_ok=True)
    else:
        missing.write_text(left_out["baseline"] + "\n")
    (libraries / "built.json").write_text(json.dumps(built, indent=2) + "\n")
    told = _told(compiler, "--version").splitlines() if built else []
    manifest = {"compiler": told[0].strip() if told else ""}
    (libraries / "manifest.json").write_text(json.dumps(manifest) + "\n")
    return left_out


def find_compiler() -> tuple[list[str], str]:
    """The command of a C++ compiler, or none and the sentence that says so."""
    if os.environ.get(KPT_CPU_BUILD) == "0":
        return [], f"it was installed with {KPT_CPU_BUILD}=0, which skips compiling: unset it, {_AGAIN}"
    for variable in ("CXX", CXXFLAGS, CPPFLAGS, LDFLAGS):
        try:
            _options(variable)
        except ValueError as error:
            given = os.environ[variable]
            return [], f"{variable} is {given!r}, which no shell could read ({error}): close its quotes, {_AGAIN}"
    if reason := _why_no_target():
        return [], reason
    cross = target() != own_architecture() and platform.system() != "Darwin"
    known = (f"{target()}-linux-gnu-g++",) if cross else ("c++", "g++", "clang++")
    asked = _kept(_options("CXX"))
    if asked and not shutil.which(asked[0]):
        return [], f"CXX names {asked[0]!r}, which is no program: set it to a C++ compiler or unset it, {_AGAIN}"
    found = asked or [name for name in known if shutil.which(name)][:1]
    if not found:
        looked_for = " and ".join(filter(None, (", ".join(known[:-1]), known[-1])))
        package = f"g++-{target().replace('_', '-')}-linux-gnu" if cross else "g++"
        return [], (
            f"no C++ compiler was found when it was installed ({looked_for} {'was' if cross else 'were'} looked for): "
            f"install one, for instance with `apt install {package}`, {_AGAIN}"
        )
    if _asked_architectures():
        if platform.system() == "Darwin":
            found += ["-arch", "arm64" if target() == "aarch64" else target()]
        made_for = _usual_name(_told(found, "-dumpmachine").partition("-")[0].strip())
        if made_for != target():
            return [], (
                f"the C++ compiler {shlex.join(found)} compiles for {made_for or 'what it does not tell'}, not for "
                f"{target()}: set CXX to one that does, {_AGAIN}"
            )
    return found, ""


def _compile_all(
    compiler: list[str], sources: Path, libraries: Path, before: dict[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Make what is not there yet, objects and then libraries, as many at once as there are cores.

    Returns:
        Why some have no library, and a digest of what each of the others was made of.
    """
    files = {path: _content(path) for path in sorted(sources.glob("*.cpp"))}
    headers = b"".join(_content(path) for path in sorted(sources.glob("*.h")))
    common = repr((compiler, _told(compiler, "--version"), platform_tag())).encode() + headers
    flags = {name: [*_kept(_options(CXXFLAGS)), *FLAGS, *its] for name, its in instruction_sets().items()}
    compiling = [*compiler, *_kept(_options(CPPFLAGS))]
    linking = ["-shared", *_options(LDFLAGS)]
    other = Path(os.environ.get(KPT_CPU_BUILT) or libraries)
    built_there = _read(other / "built.json")

    made_of, objects = dict[str, str](), dict[str, dict[Path, Path]]()
    for name, its in flags.items():
        how = common + repr((compiling, its)).encode()
        digests = {path: hashlib.sha256(how + content).hexdigest() for path, content in files.items()}
        made_of[name] = hashlib.sha256(repr((sorted(digests.values()), linking, LINKING)).encode()).hexdigest()
        objects[name] = {
            path: libraries / "objects" / f"{path.stem}.{name}.{digest[:16]}.o" for path, digest in digests.items()
        }
    to_make = list[str]()
    for name in flags:
        library = libraries / f"kpt_cpu_{name}.so"
        if before.get(name) == made_of[name] and library.exists():
            continue
        if built_there.get(name) == made_of[name] and (other / library.name).exists():
            shutil.copy2(other / library.name, library)
        else:
            to_make.append(name)
    left_out = dict[str, str]()

    def make(command: list[str], name: str, made: Path) -> None:
        if name not in left_out and (reason := _compile(command, made)):
            left_out.setdefault(name, reason)

    if to_make:
        (libraries / "objects").mkdir(exist_ok=True)
        jobs = [
            (len(files[source]) * (1 + len(flags[name])), [*compiling, *flags[name], "-c", str(source)], name, made)
            for name in to_make
            for source, made in objects[name].items()
            if not made.exists()
        ]
        jobs.sort(key=lambda job: job[0], reverse=True)  # what takes long starts early
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(lambda job: make(*job[1:]), jobs))
            for name in to_make:
                parts = [str(made) for made in objects[name].values()]
                command = [*compiler, *flags[name], *linking, *parts, *LINKING]
                pool.submit(make, command, name, libraries / f"kpt_cpu_{name}.so")
        in_use = {made for name in objects for made in objects[name].values()}
        for stale in {*(libraries / "objects").glob("*.o")} - in_use:
            stale.unlink(missing_ok=True)
    return left_out, {name: digest for name, digest in made_of.items() if name not in left_out}


def _content(path: Path) -> bytes:
    return f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes()


def _compile(command: list[str], result: Path) -> str:
    """Write an object or a library at once, so that no process sees half of it; the reason if that fails."""
    with tempfile.TemporaryDirectory(dir=result.parent) as folder:
        made = Path(folder, result.name)
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
        made.replace(result)
    return ""


def _told(compiler: list[str], option: str) -> str:
    try:
        told = subprocess.run([*compiler, option], capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return ""
    return told.stdout


def _read(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return read
