"""The build hook: what is compiled, what is kept, and that an install without a compiler succeeds and says why."""

import importlib.util
import os
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
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("KPT_CPU_BUILD", raising=False)
    monkeypatch.delenv("KPT_CPU_BUILT", raising=False)
    return tmp_path


def build(place: Path) -> tuple[dict[str, str], int]:
    """What is left out, and how often the compiler was called."""
    before = len((place / "log").read_text().splitlines())
    left_out = hook.build(place / "native", place / "libraries")
    return left_out, len((place / "log").read_text().splitlines()) - before


def there(place: Path) -> set[str]:
    return {path.name for path in (place / "libraries").iterdir()} - {"built.json", "manifest.json"}


def all_libraries() -> set[str]:
    return {f"kpt_cpu_{name}.so" for name in hook.INSTRUCTION_SETS}


def test_a_library_is_made_for_each_instruction_set_and_not_again(place):
    assert build(place) == ({}, len(hook.INSTRUCTION_SETS))
    assert there(place) == all_libraries()
    assert build(place) == ({}, 0)
    (place / "native" / "part.h").write_text("// new\n")
    assert build(place) == ({}, len(hook.INSTRUCTION_SETS)), "a changed source is compiled again"
    (place / "libraries" / "kpt_cpu_baseline.so").unlink()
    assert build(place) == ({}, 1), "a lost library is compiled again"


def test_builds_at_once_compile_once(place):
    code = "import hatch_build, pathlib, sys; hatch_build.build(*map(pathlib.Path, sys.argv[1:]))"
    command = [sys.executable, "-c", code, place / "native", place / "libraries"]
    env = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    assert [process.wait() for process in [subprocess.Popen(command, env=env) for _ in range(3)]] == [0, 0, 0]
    assert len((place / "log").read_text().splitlines()) == len(hook.INSTRUCTION_SETS)


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
    assert build(place) == ({}, len(hook.INSTRUCTION_SETS))


@pytest.mark.skipif(len(hook.INSTRUCTION_SETS) == 1, reason="this architecture has one instruction set")
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

    return [
        pytest.param(absent, "no C\\+\\+ compiler was found .* install one", id="absent"),
        pytest.param(broken, "c\\+\\+ failed \\(part.cpp:1:1: error: simulated\\)", id="broken"),
        pytest.param(misnamed, "CXX names '/nowhere/g\\+\\+', which is no program", id="misnamed"),
        pytest.param(unwanted, "KPT_CPU_BUILD=0, which skips compiling: unset it", id="unwanted"),
    ]


@pytest.mark.parametrize(("fail", "reason"), failures())
def test_where_nothing_is_compiled_the_reason_takes_the_libraries_place(fail, reason, place, monkeypatch):
    build(place)
    fail(place, monkeypatch)
    left_out, _ = build(place)
    assert set(left_out) == set(hook.INSTRUCTION_SETS)
    assert there(place) == {"missing.txt"}, "libraries of an earlier build are gone"
    monkeypatch.setattr(native, "LIBRARIES", place / "libraries")
    monkeypatch.setattr(native, "_library", None)
    with pytest.raises(native.LibraryError, match=f"{reason}.*install kpt-backend-cpu again$"):
        native.library()


def test_libraries_take_the_reason_s_place_once_there_is_a_compiler(place, monkeypatch):
    monkeypatch.setenv("KPT_CPU_BUILD", "0")
    build(place)
    monkeypatch.delenv("KPT_CPU_BUILD")
    assert build(place) == ({}, len(hook.INSTRUCTION_SETS))
    assert there(place) == all_libraries()


def test_cxx_is_used_with_its_options(place, monkeypatch):
    monkeypatch.setenv("CXX", f"{place / 'bin' / 'c++'} -DASKED")
    build(place)
    assert all(line.startswith("-DASKED ") for line in (place / "log").read_text().splitlines())


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
    for name, flags in hook.INSTRUCTION_SETS.items():
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
