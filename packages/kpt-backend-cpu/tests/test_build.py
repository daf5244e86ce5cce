"""The build hook: what is compiled, what is kept, and that an install without a compiler succeeds and says why."""

import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from kpt_backend_cpu import native

pytest.importorskip("hatchling")
PACKAGE = Path(__file__).parents[1]

#: Writes what it is asked for and notes the call; `BROKEN` and `REFUSED` in its environment make it fail.
COMPILER = """#!{python}
import os, sys
from pathlib import Path
arguments = sys.argv[1:]
if "--version" in arguments:
    raise SystemExit(print("simulated compiler", os.environ.get("VERSION", "1")))
if "-dumpmachine" in arguments:
    raise SystemExit(print(os.environ.get("MACHINE", "aarch64-linux-gnu")))
with open({log!r}, "a") as log:
    log.write(" ".join(arguments) + "\\n")
refused = [flag for flag in arguments if flag == os.environ.get("REFUSED")]
if refused:
    raise SystemExit(f"c++: error: unrecognized command-line option {{refused[0]!r}}")
if "BROKEN" in os.environ:
    raise SystemExit("part.cpp:1:1: error: simulated")
Path(arguments[arguments.index("-o") + 1]).write_text("compiled")
"""


def load_hook():
    spec = importlib.util.spec_from_file_location("hatch_build", PACKAGE / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hook = load_hook()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A package of one source, and a simulated compiler as the only one; its calls are in `log`."""
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "part.cpp").write_text("int part;\n")
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "c++"
    compiler.write_text(COMPILER.format(python=sys.executable, log=str(tmp_path / "log")))
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "log").touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    flags = ("CXX", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "ARCHFLAGS")
    for name in (*flags, "KPT_CPU_BUILD", "KPT_CPU_BUILT", "KPT_CPU_TARGET"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def build(place: Path) -> tuple[dict[str, str], int]:
    """What is left out, and how often the compiler was called."""
    before = len((place / "log").read_text().splitlines())
    left_out = hook.build(place / "native", place / "libraries")
    return left_out, len((place / "log").read_text().splitlines()) - before


def there(place: Path) -> set[str]:
    return {path.name for path in (place / "libraries").iterdir()} - {"built.json", "manifest.json", "objects"}


def commands(place: Path) -> list[list[str]]:
    """Return the arguments of each call of the simulated compiler."""
    return [line.split() for line in (place / "log").read_text().splitlines()]


#: Each of one source takes a call to compile it and one to link.
CALLS = 2 * len(hook.instruction_sets())


def all_libraries() -> set[str]:
    return {f"kpt_cpu_{name}.so" for name in hook.instruction_sets()}


def test_a_library_is_made_for_each_instruction_set_and_not_again(place):
    assert build(place) == ({}, CALLS)
    assert there(place) == all_libraries()
    assert build(place) == ({}, 0)
    (place / "native" / "part.h").write_text("// new\n")
    assert build(place) == ({}, CALLS), "with a changed header everything is compiled again"
    (place / "libraries" / "kpt_cpu_baseline.so").unlink()
    assert build(place) == ({}, 1), "a lost library is linked again"


def test_of_several_sources_only_the_changed_one_is_compiled_again(place):
    (place / "native" / "other.cpp").write_text("int other;\n")
    sets = len(hook.instruction_sets())
    assert build(place) == ({}, 3 * sets)
    (place / "native" / "other.cpp").write_text("int changed;\n")
    assert build(place) == ({}, 2 * sets)
    assert all("part.cpp" not in command for command in commands(place)[3 * sets :])
    assert len(list((place / "libraries" / "objects").iterdir())) == 2 * sets, "objects of no use are gone"
    (place / "native" / "other.cpp").unlink()
    assert build(place) == ({}, sets), "without a source the libraries are linked again"


def test_each_source_and_instruction_set_is_a_job_of_its_own_what_takes_long_first(place, monkeypatch):
    monkeypatch.setattr(hook.os, "cpu_count", lambda: 1)
    (place / "native" / "long.cpp").write_text("int " + "long" * 100 + ";\n")
    build(place)
    sources = [Path(command[command.index("-c") + 1]).name for command in commands(place) if "-c" in command]
    assert sorted(sources) == ["long.cpp"] * (CALLS // 2) + ["part.cpp"] * (CALLS // 2)
    assert sources[0] == "long.cpp"
    assert sources[-1] == "part.cpp"


def test_builds_at_once_compile_once(place):
    code = "import hatch_build, pathlib, sys; hatch_build.build(*map(pathlib.Path, sys.argv[1:]))"
    command = [sys.executable, "-c", code, place / "native", place / "libraries"]
    env = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    assert [process.wait() for process in [subprocess.Popen(command, env=env) for _ in range(3)]] == [0, 0, 0]
    assert len((place / "log").read_text().splitlines()) == CALLS


def test_what_another_folder_has_of_the_same_sources_is_taken_from_there(place, monkeypatch):
    build(place)
    monkeypatch.setenv("KPT_CPU_BUILT", str(place / "libraries"))
    copied = place / "elsewhere"
    shutil.copytree(place / "native", copied / "native")
    before = (place / "log").read_text()
    assert hook.build(copied / "native", copied / "libraries") == {}
    assert (place / "log").read_text() == before, "nothing is compiled"
    assert there(copied) == all_libraries()
    (copied / "native" / "part.cpp").write_text("int other;\n")
    hook.build(copied / "native", copied / "libraries")
    assert (place / "log").read_text() != before, "other sources are compiled"


def test_another_compiler_compiles_again(place, monkeypatch):
    build(place)
    monkeypatch.setenv("VERSION", "2")
    assert build(place) == ({}, CALLS)


@pytest.mark.skipif(CALLS == 2, reason="this architecture has one instruction set")
def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(place, monkeypatch):
    monkeypatch.setenv("REFUSED", "-mavx512bf16")
    left_out, _ = build(place)
    assert set(left_out) == {"avx512_bf16", "amx_bf16"}
    assert "unrecognized command-line option '-mavx512bf16'" in left_out["avx512_bf16"]
    assert there(place) == all_libraries() - {"kpt_cpu_avx512_bf16.so", "kpt_cpu_amx_bf16.so"}


def failures():
    def absent(place, monkeypatch):
        shutil.rmtree(place / "bin")

    def broken(place, monkeypatch):
        monkeypatch.setenv("BROKEN", "1")
        (place / "native" / "part.cpp").write_text("int changed;\n")

    def misnamed(place, monkeypatch):
        monkeypatch.setenv("CXX", "/nowhere/g++ -O1")

    def unwanted(place, monkeypatch):
        monkeypatch.setenv("KPT_CPU_BUILD", "0")

    def unknown(place, monkeypatch):
        monkeypatch.setenv("KPT_CPU_TARGET", "arm")

    def unclosed(place, monkeypatch):
        monkeypatch.setenv("LDFLAGS", "-L'/opt")

    def two(place, monkeypatch):
        monkeypatch.setattr(hook.platform, "system", lambda: "Darwin")
        monkeypatch.setenv("ARCHFLAGS", "-arch arm64 -arch x86_64")

    return [
        pytest.param(absent, "no C\\+\\+ compiler was found .* install one", id="absent"),
        pytest.param(broken, "c\\+\\+ failed \\(part.cpp:1:1: error: simulated\\)", id="broken"),
        pytest.param(misnamed, "CXX names '/nowhere/g\\+\\+', which is no program", id="misnamed"),
        pytest.param(unknown, "KPT_CPU_TARGET is 'arm'; aarch64 or x86_64 was expected: set it", id="unknown"),
        pytest.param(unclosed, 'LDFLAGS is "-L\'/opt", which no shell could read .* close its quotes', id="unclosed"),
        pytest.param(two, "ARCHFLAGS is '-arch arm64 -arch x86_64', and a library is for one .* name one", id="two"),
        pytest.param(unwanted, "KPT_CPU_BUILD=0, which skips compiling: unset it", id="unwanted"),
    ]


@pytest.mark.parametrize(("fail", "reason"), failures())
def test_where_nothing_is_compiled_the_reason_takes_the_libraries_place(fail, reason, place, monkeypatch):
    build(place)
    fail(place, monkeypatch)
    left_out, _ = build(place)
    assert set(left_out) == set(hook.instruction_sets())
    assert there(place) == {"missing.txt"}, "libraries of an earlier build are gone"
    monkeypatch.setattr(native, "LIBRARIES", place / "libraries")
    monkeypatch.setattr(native, "_library", None)
    with pytest.raises(native.LibraryError, match=f"{reason}.*install kpt-backend-cpu again$"):
        native.library()


def test_libraries_take_the_reason_s_place_once_there_is_a_compiler(place, monkeypatch):
    monkeypatch.setenv("KPT_CPU_BUILD", "0")
    build(place)
    monkeypatch.delenv("KPT_CPU_BUILD")
    assert build(place) == ({}, CALLS)
    assert there(place) == all_libraries()


def test_cxx_is_used_with_its_options(place, monkeypatch):
    monkeypatch.setenv("CXX", f"{place / 'bin' / 'c++'} -DASKED")
    build(place)
    assert all(command[0] == "-DASKED" for command in commands(place))


def test_flags_come_before_ours_and_others_compile_again(place, monkeypatch):
    build(place)
    monkeypatch.setenv("CPPFLAGS", "-DFIRST")
    monkeypatch.setenv("CXXFLAGS", "-O1 -mtune=native")
    assert build(place) == ({}, CALLS)
    for command in commands(place)[CALLS:]:
        if "-c" in command:
            assert command[:4] == ["-DFIRST", "-O1", "-mtune=native", "-std=c++17"]
            assert command.index("-O1") < command.index("-O3"), "ours decide"
        else:
            assert command[:2] == ["-O1", "-mtune=native"], "flags such as -fsanitize= are for linking too"
    monkeypatch.setenv("LDFLAGS", "-Wl,-z,now")
    assert build(place) == ({}, CALLS // 2), "other options of the linker link again"
    for command in commands(place)[2 * CALLS :]:
        assert "-c" not in command
        assert command.index("-shared") < command.index("-Wl,-z,now") < command.index(hook.LINKING[0])


MARCH = "-march=native"


@pytest.mark.parametrize("variable", ["CXX", "CXXFLAGS", "CPPFLAGS"])
@pytest.mark.parametrize("option", [MARCH, "-mcpu=native", "-mavx2", "-mno-sse4.2", "-mamx-tile", "-m32"])
def test_an_option_that_selects_instructions_is_left_out_and_told(variable, option, place, monkeypatch):
    program = f"{place / 'bin' / 'c++'} " if variable == "CXX" else ""
    monkeypatch.setenv(variable, f"{program}-g {option} -m64 -mtune=generic")
    monkeypatch.setattr(hook, "_INSTRUCTION_SETS", {hook.target(): {"baseline": ()}})
    build(place)
    compiled = next(command for command in commands(place) if "-c" in command)
    assert option not in compiled
    assert {"-g", "-m64", "-mtune=generic"} <= set(compiled)
    (sentence,) = hook.ignored_options()
    assert f"without {option!r} of {variable}: " in sentence


def test_a_cross_compiler_of_the_usual_name_is_taken_for_a_target(place, monkeypatch):
    monkeypatch.setattr(hook.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(hook.platform, "system", lambda: "Linux")
    monkeypatch.setattr(hook.sysconfig, "get_platform", lambda: "linux-x86_64")
    monkeypatch.setenv("KPT_CPU_TARGET", "aarch64")
    left_out, _ = build(place)
    assert "aarch64-linux-gnu-g++ was looked for" in left_out["baseline"]
    assert "`apt install g++-aarch64-linux-gnu`" in left_out["baseline"]
    (place / "bin" / "c++").rename(place / "bin" / "aarch64-linux-gnu-g++")
    assert build(place) == ({}, 2)
    assert there(place) == {"kpt_cpu_baseline.so"}, "NEON is in its baseline"
    assert hook.platform_tag() == "linux_aarch64"
    monkeypatch.setenv("MACHINE", "x86_64-linux-gnu")
    left_out, _ = build(place)
    assert "compiles for x86_64, not for aarch64: set CXX" in left_out["baseline"]


def test_the_other_way_round_all_instruction_sets_of_x86_are_made(place, monkeypatch):
    monkeypatch.setattr(hook.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(hook.platform, "system", lambda: "Linux")
    monkeypatch.setattr(hook.sysconfig, "get_platform", lambda: "linux-aarch64")
    monkeypatch.setenv("KPT_CPU_TARGET", "x86_64")
    monkeypatch.setenv("CXX", str(place / "bin" / "c++"))
    monkeypatch.setenv("MACHINE", "x86_64-linux-gnu")
    assert build(place) == ({}, 10)
    assert hook.platform_tag() == "linux_x86_64"


def test_archflags_name_the_target_on_macos(place, monkeypatch):
    monkeypatch.setattr(hook.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(hook.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(hook.sysconfig, "get_platform", lambda: "macosx-11.0-universal2")
    assert hook.platform_tag() == "macosx_11_0_x86_64"
    monkeypatch.setenv("ARCHFLAGS", "-arch arm64")
    monkeypatch.setenv("MACHINE", "arm64-apple-darwin23")
    assert build(place) == ({}, 2)
    assert all(command[:2] == ["-arch", "arm64"] for command in commands(place))
    assert hook.platform_tag() == "macosx_11_0_arm64"


@pytest.fixture
def built(place, monkeypatch):
    """Libraries that a build has made, as the package would use them."""
    build(place)
    monkeypatch.setattr(native, "LIBRARIES", place / "libraries")
    loaded = native.Library("baseline", ("baseline",), None)
    monkeypatch.setattr(native, "_library", loaded)
    return place / "libraries"


def test_the_build_names_its_compiler(built, monkeypatch):
    assert native.provenance() == {"compiler": "simulated compiler 1", "isa": "baseline"}
    (built / "manifest.json").unlink()
    assert native.provenance()["compiler"] == "unknown"
    (built / "kpt_cpu_baseline.so").unlink()
    assert native.provenance() == {}


def copy_of_the_package(place: Path) -> Path:
    """The package with the one source of `place`, so that a real compiler would be quick too."""
    copy = place / "package"
    ignored = shutil.ignore_patterns("libraries", "tests", "native", "__pycache__", ".mypy_cache")
    shutil.copytree(PACKAGE, copy, ignore=ignored)
    shutil.copytree(place / "native", copy / "native")
    return copy


def wheel(copy: Path, editable: bool = False) -> Path:
    """Build as pip does, in a process of its own."""
    what = "build_editable" if editable else "build_wheel"
    code = f"import hatchling.build, sys; print(hatchling.build.{what}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, copy.parent], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return copy.parent / done.stdout.split()[-1]


PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")


def test_a_wheel_with_libraries_is_of_this_platform_and_any_python(place):
    made = wheel(copy_of_the_package(place))
    if "universal2" not in PLATFORM:
        assert made.name.endswith(f"-py3-none-{PLATFORM}.whl")
    names = zipfile.ZipFile(made).namelist()
    assert {name.rpartition("/")[2] for name in names if "/libraries/" in name} == {
        *all_libraries(),
        "manifest.json",
    }
    metadata = next(name for name in names if name.endswith("/WHEEL"))
    assert b"Root-Is-Purelib: false" in zipfile.ZipFile(made).read(metadata)


def test_an_editable_install_compiles_into_the_source(place):
    copy = copy_of_the_package(place)
    wheel(copy, editable=True)
    libraries = copy / "src" / "kpt_backend_cpu" / "libraries"
    assert {path.name for path in libraries.glob("*.so")} == all_libraries()


def test_a_wheel_without_libraries_is_pure_and_holds_the_reason(place, monkeypatch):
    monkeypatch.setenv("KPT_CPU_BUILD", "0")
    made = wheel(copy_of_the_package(place))
    assert made.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(made).namelist()
    held = {name.rpartition("/")[2] for name in names if "/libraries/" in name}
    assert held == {"manifest.json", "missing.txt"}
    assert b"KPT_CPU_BUILD=0" in zipfile.ZipFile(made).read("kpt_backend_cpu/libraries/missing.txt")


def test_a_source_distribution_holds_the_sources_and_no_library(place):
    copy = copy_of_the_package(place)
    wheel(copy, editable=True)
    assert (copy / "src" / "kpt_backend_cpu" / "libraries" / "kpt_cpu_baseline.so").exists()
    code = "import hatchling.build, sys; print(hatchling.build.build_sdist(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, place], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(place / done.stdout.split()[-1]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"native/part.cpp", "hatch_build.py", "src/kpt_backend_cpu/native.py"} <= set(names)
    assert [name for name in names if "libraries" in name] == []


def test_every_instruction_set_that_the_compiler_knows_has_a_library(kernels, tmp_path):
    compiler, reason = hook.find_compiler()
    if not compiler:
        pytest.skip(reason)
    (tmp_path / "empty.cpp").write_text("int nothing;\n")
    for name, flags in hook.instruction_sets().items():
        command = [*compiler, *flags, "-c", str(tmp_path / "empty.cpp"), "-o", os.devnull]
        known = subprocess.run(command, capture_output=True).returncode == 0
        assert (native.LIBRARIES / f"kpt_cpu_{name}.so").exists() is known, name


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_libraries_need_the_system_s_c_library_alone(kernels):
    for path in native.LIBRARIES.glob("*.so"):
        told = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        needed = [line.partition("[")[2].rstrip("]") for line in told.splitlines() if "(NEEDED)" in line]
        kinds = {name.partition(".so")[0].partition("-")[0] for name in needed}
        assert kinds <= {"libc", "libm", "libpthread", "ld"}, (path.name, needed)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_threads_are_asked_of_old_and_new_systems_alike(tmp_path):
    """Where this is built decides no wheel's tag: pthread_create of glibc 2.34 would make it manylinux_2_34."""
    compiler, reason = hook.find_compiler()
    if not compiler:
        pytest.skip(reason)
    made = tmp_path / "parallel.so"
    command = [*compiler, *hook.FLAGS, "-shared", str(PACKAGE / "native" / "parallel.cpp"), "-o", str(made)]
    subprocess.run(command, check=True)
    told = subprocess.run(["readelf", "-W", "--dyn-syms", made], capture_output=True, text=True, check=True).stdout
    needed = {name: tuple(map(int, version.split("."))) for name, version in re.findall(r"(\w+)@GLIBC_([\d.]+)", told)}
    assert {"pthread_create", "pthread_join"} <= set(needed)
    assert max(needed.values()) <= (2, 28), needed
