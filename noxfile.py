"""The checks of the repository, one session each; `nox -l` lists them, CONTRIBUTING.md explains them.

Environments stay in .nox/ and are used again. Those with torch are: one per package under test, `workspace`, where
every package is installed and which most others share, `aot` with the compilers, and `wheels`, made anew each time.
Everything is installed under constraints/cpu.txt, so a check gives the same answer today and in a year.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2026.10.20"
nox.options.sessions = ["lint", "imports", "tests"]
nox.options.default_venv_backend = "virtualenv"  # not uv, which looks for CPU builds of torch in other places than pip
nox.options.reuse_venv = "yes"
nox.options.stop_on_first_error = False

PINS = "constraints/cpu.txt"
FLOORS = "constraints/lowest.txt"
COMPILERS = "constraints/aot.txt"
#: What the suite's cases of real models' sizes are named for.
MODELS = " or ".join(("granite", "deepseek", "qwen3", "mixtral", "olmoe"))
DIST = Path("dist")
WORKSPACE = Path(".nox/workspace/bin").absolute()
OUT_OF_TREE = Path("packages/kpt-core/tests/out_of_tree")
NATIVE = "packages/kpt-backend-cpu/tests/native"


def project_file(package: str) -> dict[str, Any]:
    """Read a package's pyproject.toml."""
    return nox.project.load_toml(f"packages/{package}/pyproject.toml")


def name_of(requirement: str) -> str:
    """Return what a requirement is on."""
    return re.split(r"[^\w-]", requirement)[0]


def siblings(package: str) -> set[str]:
    """Return the package and every package of ours that it or its tests require, directly or through another."""
    file = project_file(package)
    required = [*file["project"]["dependencies"], *nox.project.dependency_groups(file, "test")]
    names = {name_of(requirement) for requirement in required} - {package}
    return {package}.union(*(siblings(name) for name in names if Path("packages", name).exists()))


#: Each package after those that it requires.
PACKAGES = sorted(
    (path.parent.name for path in Path("packages").glob("*/pyproject.toml")),
    key=lambda package: (len(siblings(package)), package),
)


def requirements(*packages: str) -> list[str]:
    """Return what pip is asked for: the packages and their siblings, editable, and what the packages' tests need."""
    ours = sorted(set().union(*(siblings(package) for package in packages)))
    editable = [argument for package in ours for argument in ("-e", f"packages/{package}")]
    groups = [nox.project.dependency_groups(project_file(package), "test") for package in packages]
    wanted = set().union(*groups)
    # pip asks an index for what is named, though it is there, editable; what is named with an extra it finds.
    return [*editable, *sorted(name for name in wanted if "[" in name or name_of(name) not in ours)]


def install(session: nox.Session, *packages: str, also: tuple[str, ...] = (), constraints: str = PINS) -> None:
    """Install packages, their siblings, what their tests need and `also`, under constraints."""
    session.log("The first time this takes a minute or two, because torch is large.")
    session.install("-c", constraints, "--build-constraint", PINS, *requirements(*packages), *also)
    if "kpt-triton" in set().union(*(siblings(package) for package in packages)):
        # By itself, because a torch for CUDA asks for another Triton; without a GPU it need not be that one.
        session.install("-c", COMPILERS, "triton")


def run_tests(session: nox.Session, package: str, *options: str) -> None:
    """Run the tests of one package, where nothing may be fetched from a model hub."""
    env = {"HF_HUB_OFFLINE": "1"}
    if package == "kpt-conformance":
        env["OMP_NUM_THREADS"] = "1"  # its cases are so small that more threads only wait for each other
    left_out = (f"--ignore={OUT_OF_TREE}", f"--ignore={NATIVE}")  # by `wheels` and `native`
    session.run("pytest", f"packages/{package}/tests", *left_out, *options, *session.posargs, env=env)


@nox.session
@nox.parametrize("package", [nox.param(package, id=package) for package in PACKAGES])
def tests(session: nox.Session, package: str) -> None:
    """Test one package with only its siblings and its requirements installed: for kpt-core, torch alone."""
    install(session, package)
    run_tests(session, package)


@nox.session
def aot(session: nox.Session) -> None:
    """Compile every kernel for every chip that its backend claims, without a GPU, and check what each must be."""
    install(session, "kpt-conformance", *(package for package in PACKAGES if package.startswith("kpt-backend-")))
    compilers = project_file("kpt-conformance")["project"]["optional-dependencies"]["aot"]
    session.install("-c", COMPILERS, *compilers)
    # By two runs: that of kpt-triton asks for the interpreter, where nothing is compiled.
    session.run("pytest", "packages/kpt-conformance/tests/aot", env={"KPT_AOT": "1"})
    session.run("pytest", "packages/kpt-triton/tests/aot", env={"KPT_AOT": "1"})
    session.run("python", "-m", "kpt_conformance.aot", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff; `nox -s lint -- --fix` mends what ruff can mend."""
    session.install("-c", PINS, "ruff")
    if "--fix" in session.posargs:
        session.run("ruff", "check", "--fix", ".")
        session.run("ruff", "format", ".")
    else:
        session.run("ruff", "check", ".")
        session.run("ruff", "format", "--check", ".")


@nox.session
def imports(session: nox.Session) -> None:
    """Check who may import whom, from the source alone."""
    session.install("-c", PINS, "import-linter")
    source = os.pathsep.join(str(Path("packages", package, "src").absolute()) for package in PACKAGES)
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": source})


@nox.session
def workspace(session: nox.Session) -> None:
    """Install every package, editable, into the environment that demo, bench, docs and types share."""
    install(session, *PACKAGES, also=("mypy", "nox", "types-psutil"))


@nox.session(venv_backend="none", requires=["workspace"])
def types(session: nox.Session) -> None:
    """Check the types of all packages with mypy's strict mode."""
    session.run(WORKSPACE / "mypy", *session.posargs, external=True)


@nox.session(venv_backend="none", requires=["workspace"])
def docs(session: nox.Session) -> None:
    """Check that README code and examples run, links resolve, and packages are what the house rules say."""
    session.run(WORKSPACE / "pytest", "tools", *session.posargs, external=True)


def run_suite(session: nox.Session, *options: str) -> None:
    """Run the conformance suite over the references and every backend in the workspace that can run here."""
    names = "import kpt_core; print(*(n for n, b in kpt_core.backends().items() if not b.unavailable()))"
    found = subprocess.run([WORKSPACE / "python", "-c", names], stdout=subprocess.PIPE, text=True, check=True)
    for backend in ["reference", *found.stdout.split()]:
        command = (f"--kpt-backend={backend}", *options, *session.posargs)
        # 5: `-k` left nothing of this backend.
        session.run(WORKSPACE / "pytest", *command, external=True, success_codes=[0, 5])


@nox.session(venv_backend="none", requires=["workspace"])
def conformance(session: nox.Session) -> None:
    """Hold every reference, and every kernel that can run on this machine, to the conformance suite."""
    run_suite(session)


def run_interpreted(session: nox.Session, *options: str) -> None:
    """Run the suite over the Triton kernels in Triton's interpreter, on the CPU."""
    env = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = ("--kpt-backend=nvidia", "--kpt-device=cpu", "-q", *options, *session.posargs)
    session.run(WORKSPACE / "pytest", *command, external=True, env=env)


@nox.session(venv_backend="none", requires=["workspace"])
def interpreter(session: nox.Session) -> None:
    """Hold every Triton kernel to the conformance suite in Triton's interpreter: in float32, and values in bfloat16.

    Real models' sizes and float16 are left to `nox -s evidence`: they take most of the time.
    """
    some = f"(float32 or (values and bfloat16) or declaration) and not ({MODELS})"
    run_interpreted(session, *(() if session.posargs else ("-k", some)))


@nox.session(venv_backend="none", requires=["workspace"])
def native(session: nox.Session) -> None:
    """Test the native CPU kernels in C++, under sanitizers too, on what hypothesis draws, and by the conformance suite.

    For this machine's best instruction set the suite leaves out real models' sizes alone, which `nox -s evidence` has;
    of the others it compares values. What kpt-moe compiles is compiled once more with every backend's kernels.
    """
    session.run(WORKSPACE / "python", f"{NATIVE}/sanitize.py", *session.posargs, external=True)
    session.run(WORKSPACE / "pytest", NATIVE, external=True)
    names = "from kpt_backend_cpu.native import library; print(*library().there)"
    found = subprocess.run([WORKSPACE / "python", "-c", names], stdout=subprocess.PIPE, text=True, check=True)
    for place, name in enumerate(found.stdout.split()):
        command = ("--kpt-backend=cpu", "-q", "-k", "values" if place > 0 else f"not ({MODELS})")
        session.run(WORKSPACE / "pytest", *command, external=True, env={"KPT_CPU_ISA": name})
    compiled = "compil or break or traced or graph"  # in names of tests
    offline = {"HF_HUB_OFFLINE": "1"}
    session.run(WORKSPACE / "pytest", "packages/kpt-moe/tests", "-q", "-k", compiled, external=True, env=offline)


@nox.session(venv_backend="none", requires=["workspace", "aot"], default=False)
def evidence(session: nox.Session) -> None:
    """Record in evidence/ what suite, interpreter and compilers prove, and write docs/support.md from the records."""
    run_suite(session, "--kpt-evidence=evidence")
    run_interpreted(session, "--kpt-evidence=evidence")
    session.run(Path(".nox/aot/bin/python"), "-m", "kpt_conformance.aot", "--evidence", "evidence", external=True)
    session.run(WORKSPACE / "python", "-m", "kpt_conformance.evidence", "write", external=True)


@nox.session(venv_backend="none", requires=["workspace"])
def demo(session: nox.Session) -> None:
    """Run `kpt demo`; what follows `--` is handed to it."""
    session.run(WORKSPACE / "kpt", "demo", *session.posargs, external=True)


@nox.session(venv_backend="none", requires=["workspace"])
def bench(session: nox.Session) -> None:
    """Run `kpt bench cpu`; what follows `--` is handed to it."""
    session.run(WORKSPACE / "kpt", "bench", "cpu", *session.posargs, external=True)


@nox.session(reuse_venv=False)
def wheels(session: nox.Session) -> None:
    """Build every sdist and wheel, install the wheels in a clean environment and try them there."""
    shutil.rmtree(DIST, ignore_errors=True)
    session.install("-c", PINS, "build")
    for package in PACKAGES:
        env = {"PIP_CONSTRAINT": PINS, "PIP_BUILD_CONSTRAINT": PINS}
        session.run("python", "-m", "build", "--outdir", DIST, f"packages/{package}", env=env)
    built = sorted(str(path) for path in DIST.glob("*.whl"))
    # Wheels are named by path, so that no sibling can come from an index.
    session.install("-c", PINS, *built, "pytest", "hypothesis", "hatchling")
    session.run("python", "-m", "pip", "check")
    session.run("python", "tools/check_wheels.py", DIST)
    session.run("python", "tools/check_native.py")
    if OUT_OF_TREE.exists():
        session.run("pytest", OUT_OF_TREE, env={"KPT_WHEELS": str(DIST.absolute())})
    root = Path.cwd()
    session.chdir(session.create_tmp())  # away from the source
    session.run("python", "-m", "kpt_core")
    session.run("kpt", "doctor")
    # The backend that `kpt new` writes is complete: nothing is added before the suite runs.
    session.run("kpt", "new", "backend", "skeleton")
    session.chdir("kpt-backend-skeleton")
    session.run("python", "-m", "pip", "install", "--no-index", "--no-build-isolation", ".")
    # The cases are small: more threads would wait for each other, longest where CI runs other sessions beside this one.
    session.run("pytest", env={"OMP_NUM_THREADS": "1"})
    without_compiler(session, root)


def without_compiler(session: nox.Session, root: Path) -> None:
    """Put a wheel of the native kernels that was built without a compiler in the place of the other, and try it."""
    session.chdir(root)
    pure = Path(session.create_tmp(), "pure").absolute()
    shutil.rmtree(pure, ignore_errors=True)
    # From the source distribution: the libraries beside the source stay.
    (source,) = DIST.glob("kpt_backend_cpu-*.tar.gz")
    env = {"PIP_CONSTRAINT": PINS, "PIP_BUILD_CONSTRAINT": PINS, "KPT_CPU_BUILD": "0"}
    session.run("python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", pure, source, env=env)
    session.install("--no-deps", "--force-reinstall", *map(str, pure.glob("*.whl")))
    session.run("python", "tools/check_wheels.py", pure)
    session.run("python", "tools/check_native.py", "KPT_CPU_BUILD=0")


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Build the wheels and prove with them what only this machine's GPU can prove (docs/gpu.md)."""
    needed = ("torch", "transformers", "typer", "rich", "safetensors", "pytest", "hypothesis", "numpy", "nvidia-ml-py")
    session.install("-c", PINS, "build", *needed)
    folder = Path(session.create_tmp(), "wheels").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        env = {"PIP_CONSTRAINT": PINS, "PIP_BUILD_CONSTRAINT": PINS}
        session.run("python", "-m", "build", "--wheel", "--outdir", str(folder), f"packages/{package}", env=env)
    session.run("python", "tools/gpu", "--wheels", str(folder), *session.posargs)


@nox.session(default=False)
@nox.parametrize("package", [nox.param(package, id=package) for package in ("kpt-core", "kpt-moe")])
def lowest(session: nox.Session, package: str) -> None:
    """Test with the oldest supported requirements. Not in CI: the old torch brings several GB of CUDA libraries."""
    install(session, package, constraints=FLOORS)
    # The deprecation warnings of an old torch are no business of ours.
    run_tests(session, package, "-W", "default")


@nox.session(default=False, reuse_venv=False)
def pins(session: nox.Session) -> None:
    """Resolve every requirement anew, torch excepted, and rewrite constraints/cpu.txt; test and commit the result."""
    lines = Path(PINS).read_text().splitlines()
    header = [line for line in lines if line.startswith("#")]
    torch = next(line for line in lines if line.startswith("torch=="))
    tools = ["build", "editables", "hatchling", "import-linter", "mypy", "nox", "ruff", "types-psutil"]
    session.install(torch, *requirements(*PACKAGES), *tools)
    frozen = str(session.run("python", "-m", "pip", "freeze", "--exclude-editable", silent=True))
    pinned = [re.sub(r"\+\w+$", "", line) for line in frozen.splitlines() if "==" in line]
    Path(PINS).write_text("\n".join([*header, *pinned]) + "\n")
