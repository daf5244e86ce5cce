"""The checks of the repository, one session each; `nox -l` lists them, CONTRIBUTING.md explains them.

Environments stay in .nox/ and are used again. There is one for nearly everything, `workspace`, where every package is
installed, with the compilers and the tools; and `wheels`, made anew each time, where only what we ship is. Everything
is installed under constraints/cpu.txt, so a check gives the same answer today and in a year.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

sys.path.append(str(Path(__file__).parent / "tools"))
import affected
from affected import PACKAGES, name_of, project_file, siblings

nox.needs_version = ">=2026.10.20"
nox.options.sessions = ["lint", "imports", "tests"]
nox.options.default_venv_backend = "virtualenv"  # not uv, which looks for CPU builds of torch in other places than pip
nox.options.reuse_venv = "yes"
nox.options.stop_on_first_error = False

PINS = "constraints/cpu.txt"
FLOORS = "constraints/lowest.txt"
COMPILERS = "constraints/aot.txt"
IPEX = "constraints/ipex.txt"
TORCH_XLA = "constraints/tpu.txt"
SITE = "constraints/site.txt"
CLIENTS = "constraints/clients.txt"
SERVE = "constraints/serve.txt"
RAY = "constraints/ray.txt"
QUALITY = "constraints/quality.txt"
VLLM = "constraints/vllm.txt"
RELEASE = "constraints/release.txt"
SCHEMAS = {
    "github-workflows": sorted(map(str, Path(".github/workflows").glob("*.yml"))),
    "github-issue-forms": [f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "device", "idea")],
    "citation-file-format": ["CITATION.cff"],
}
TOOLS = ("build", "import-linter", "mypy", "nox", "pytest-timeout", "pytest-xdist", "ruff", "types-psutil")
#: What the suite's cases of real models' sizes are named for.
MODELS = " or ".join(("granite", "deepseek", "qwen3", "mixtral", "olmoe"))
#: Checks that are run on `xla`: values, and those that compile few graphs beside them.
ON_XLA = (
    "small and (values or float32 and (process_state or autocast or without_gradients or single_gradients or "
    "inputs_unchanged or no_aliasing or repeatable or threads or poisoned_outputs or result_type or fake_result or "
    "double_use or custom_ops or no_host_sync))"
)
#: The ops that the suite tries, as the names of these begin; all where it is empty. .ci/run sets it.
KPT_OPS = "KPT_OPS"
#: The pages of the site that are looked at; all where it is empty. .ci/run sets it.
KPT_PAGES = "KPT_PAGES"
DIST = Path("dist")
REPORTS = Path("reports")
BIN = Path(".nox/workspace/bin").absolute()
OUT_OF_TREE = Path("packages/kpt-core/tests/out_of_tree")
NATIVE = "packages/kpt-backend-cpu/tests/native"
PEERS = "packages/kpt-serve/tests/peers"
METRICS = "packages/kpt-serve/tests/metrics"
MANIFESTS = "packages/kpt-serve/tests/manifests"
ON_RAY = "packages/kpt-serve/tests/ray"
IN_VLLM = "packages/kpt-vllm/tests"
#: Debian's packages that compile for ARM and run that, and a program of each.
CROSS = {"g++-aarch64-linux-gnu": "aarch64-linux-gnu-g++", "qemu-user": "qemu-aarch64"}
LIBRARIES = Path("packages/kpt-backend-cpu/src/kpt_backend_cpu/libraries")
#: A process for each core; each test stays small, so more threads would only wait for each other.
#: A test that hangs ends its process, which says where, so that the others go on; none takes a quarter of that.
SIDE_BY_SIDE = ("-n", "logical", "--maxprocesses=8", "--dist=worksteal", "--timeout=480", "--timeout-method=thread")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
#: Where there is a torch for vendors' GPUs that is not on PyPI; each brings its Triton.
INDEXES = {name: f"https://download.pytorch.org/whl/{folder}" for name, folder in (("amd", "rocm6.4"), ("xpu", "xpu"))}
in_workspace = nox.session(venv_backend="none", requires=["workspace"])


def requirements(*packages: str) -> list[str]:
    """Return what pip is asked for: the packages and their siblings, editable, and what the packages' tests need."""
    ours = sorted(set().union(*(siblings(package) for package in packages)))
    editable = [argument for package in ours for argument in ("-e", f"packages/{package}")]
    groups = [nox.project.dependency_groups(project_file(package), "test") for package in packages]
    wanted = set().union(*groups)
    # pip asks an index for what is named, though it is there, editable; what is named with an extra it finds.
    return [*editable, *sorted(name for name in wanted if "[" in name or name_of(name) not in ours)]


def extra_of(package: str, name: str) -> list[str]:
    """Return what an extra of a package asks for."""
    return list(project_file(package)["project"]["optional-dependencies"][name])


def extra(name: str) -> list[str]:
    """Return what an extra of kpt-conformance asks for."""
    return extra_of("kpt-conformance", name)


@nox.session
def workspace(session: nox.Session) -> None:
    """Install every package, editable, with compilers and tools: the environment of most sessions."""
    session.log("The first time this takes a minute or two, because torch is large.")
    wanted = [*requirements(*PACKAGES), *extra("bench"), *TOOLS]
    session.install("-c", PINS, "--build-constraint", PINS, *wanted)
    # By themselves, because a torch for CUDA asks for another Triton; without a GPU it need not be that one.
    session.install("-c", COMPILERS, *extra("aot"))


def run(session: nox.Session, program: str, *arguments: str | Path, **options: Any) -> None:
    """Run a program of the workspace."""
    session.run(BIN / program, *arguments, external=True, **options)


def test(session: nox.Session, package: str, *arguments: str) -> None:
    """Run tests of one package, where nothing may be fetched from a model hub; `-k` may leave none of them."""
    # Tests start many processes, each of which would compile anew what it imports if no bytecode were kept.
    env: dict[str, str | None] = {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": None}
    if package != "kpt-backend-cpu":  # what it computes with several threads is part of what its tests are about
        env.update(ONE_THREAD)
    # By `wheels`, `cpu`, `serve` and `ray`.
    left_out = (f"--ignore={OUT_OF_TREE}", f"--ignore={NATIVE}", f"--ignore={PEERS}", f"--ignore={ON_RAY}")
    run(session, "pytest", *SIDE_BY_SIDE, *left_out, *arguments, env=env, success_codes=[0, 5])


@in_workspace
def tests(session: nox.Session) -> None:
    """Test every package, or what is named: `nox -s tests -- packages/kpt-moe/tests -k grouped`.

    Unless `--whole` is given, tests that are marked slow are left out, mostly the same again with another setting; and
    of tests with several parameters so many combinations are run as have every value of each (`--each-value`).
    """
    named = [argument for argument in session.posargs if re.match(r"(\./)?packages/[\w-]+", argument)]
    options = [argument for argument in session.posargs if argument not in named]
    if "--whole" in options:
        options.remove("--whole")
    else:
        options += ["--each-value", *(() if "-m" in options else ("-m", "not slow"))]
    if not named:
        session.log("all packages: 17 to 25 minutes on two cores, after 4 to 8 for the workspace where it is new")
    failed = []
    for package in PACKAGES:
        paths = [path for path in named if Path(path).parts[1] == package] if named else [f"packages/{package}/tests"]
        try:
            # A process for each package: they hide and replace plug-ins, and some want Triton interpreted.
            if paths:
                test(session, package, *paths, *options)
        except CommandFailed:
            failed.append(package)
    if failed:
        session.error(f"tests failed in {', '.join(failed)}")


@in_workspace
def quick(session: nox.Session) -> None:
    """Test the packages that have files that aren't committed yet, as `tests` does."""
    told = run_for_output("git", "status", "--porcelain", "--no-renames", "--untracked-files=all")
    touched = sorted({name for line in told.splitlines() if (name := package_of(line[3:])) is not None})
    if not touched:
        session.skip("no package has files that aren't committed yet")
    for package in touched:
        options = ("--each-value", "-m", "not slow", "--maxfail=5", *session.posargs)
        test(session, package, f"packages/{package}/tests", *options)


def package_of(path: str) -> str | None:
    """Return the package that a file of the repository is in."""
    parts = Path(path).parts
    return parts[1] if parts[0] == "packages" and parts[1] in PACKAGES else None


@in_workspace
def transformers(session: nox.Session) -> None:
    """Run the tests that use transformers with another version of it: `nox -s transformers -- 5.24.0`.

    That version lies before the workspace's on the path, whose other packages serve it. Options of pytest may follow;
    without them every class is compared with eager (ten minutes), and TRL and others are tried (tools/families).
    """
    version, *options = session.posargs or session.error("give a version: nox -s transformers -- 5.24.0")
    folder = Path(f".nox/transformers-{version}").absolute()
    if not folder.exists():
        wanted = ("--quiet", "--no-deps", "--target", folder, f"transformers=={version}")
        run(session, "python", "-m", "pip", "install", *wanted)
    session.env["PYTHONPATH"] = str(folder)
    failed = []
    for package in ("kpt-moe", "kpt-fp8", "kpt-attention"):
        tests = sorted(Path(f"packages/{package}/tests").rglob("test_*.py"))
        using = [str(path) for path in tests if "transformers" in path.read_text(encoding="utf-8")]
        try:
            if using:
                test(session, package, *using, "--each-value", "-m", "not slow", *options)
        except CommandFailed:
            failed.append(package)
    if not options:  # every class that a tiny model can be made of, and libraries that train and serve such models
        failed += families(session, version, folder)
    if failed:
        session.error(f"with transformers {version}, tests failed in {', '.join(failed)}")


def families(session: nox.Session, version: str, folder: Path) -> list[str]:
    """Compare models with eager ones, class by class and through other libraries; return what failed."""
    clients = beside(session, CLIENTS)
    failed = []
    for subject in ("attention", "experts"):
        report = REPORTS / f"families-{subject}-{version}.json"
        try:
            run(session, "python", "tools/families/sweep.py", "run", "--subject", subject, "--out", report)
        except CommandFailed:
            failed.append(report.name)
    session.env["PYTHONPATH"] = f"{folder}{os.pathsep}{clients}"
    try:
        run(session, "python", "tools/families/clients.py")
    except CommandFailed:
        failed.append("clients")
    return failed


def beside(session: nox.Session, constraints: str) -> Path:
    """Install what a file pins, for the front of the path before the workspace's packages; return the folder."""
    # So called, or dill takes pyarrow for the user's own code.
    folder = Path(f".nox/{Path(constraints).stem}/site-packages").absolute()
    if not folder.exists():
        run(session, "python", "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, "-r", constraints)
    return folder


@in_workspace
def serve(session: nox.Session) -> None:
    """Ask `kpt serve` with NVIDIA's client and schemathesis, and beside KServe's server; ask Prometheus what it tells.

    What they need lies before the workspace's packages on the path, another protobuf for one. Checkers read manifests.
    """
    folder = beside(session, SERVE)
    session.env["PYTHONPATH"] = str(folder)
    session.env["KPT_HADOLINT"] = str(folder / "bin/hadolint")
    session.env["KPT_KUBERNETES_VALIDATE"] = str(folder / "bin/kubernetes-validate")
    try:
        found = run_for_output("sh", f"{METRICS}/fetch_prometheus.sh", Path(".nox/prometheus").absolute())
        session.env["KPT_PROMETHEUS"] = found.strip()
    except subprocess.CalledProcessError:
        session.warn("Debian's Prometheus can't be had here, so its tests are left out; `apt-get update` may help")
    for tests in (PEERS, METRICS, MANIFESTS):  # processes of their own: other protobufs were imported
        run(session, "pytest", tests, "-q", "--timeout=480", *session.posargs, env=ONE_THREAD)


@nox.session(venv_backend="none", requires=["workspace"], default=False)
def ray(session: nox.Session) -> None:
    """Kill replicas and nodes of Ray Serve under load. Not in CI: Ray takes 400 MB, the test two minutes."""
    session.env["PYTHONPATH"] = str(beside(session, RAY))
    run(session, "pytest", ON_RAY, "-q", "-s", "--timeout=480", *session.posargs, env=ONE_THREAD)


@nox.session(venv_backend="none", requires=["workspace"], default=False)
def quality(session: nox.Session) -> None:
    """Compare a model in FP8 with bfloat16 by lm-eval, in bits per byte. Not in CI: it takes 660 MB, and minutes.

    Options follow: `nox -s quality -- --only row`.
    """
    session.env["PYTHONPATH"] = str(beside(session, QUALITY))
    run(session, "python", "benchmarks/quality.py", *session.posargs)


@nox.session(venv_backend="none", requires=["workspace"], default=False)
def vllm(session: nox.Session) -> None:
    """Run models by vLLM for CPUs with KPT's experts and without. Not in CI: vLLM and what it needs take 1.3 GB.

    They lie before the workspace's packages on the path, an older transformers among them; torch is the workspace's.
    """
    session.env["PYTHONPATH"] = str(beside(session, VLLM))
    # The workspace has a library of TPUs, by which vLLM would take this machine for one.
    env = {"VLLM_TARGET_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    run(session, "pytest", IN_VLLM, "-q", "--timeout=480", *session.posargs, env=env)


@in_workspace
def lint(session: nox.Session) -> None:
    """Check style and format with ruff; `nox -s lint -- --fix` mends what ruff can mend."""
    fix = "--fix" in session.posargs
    run(session, "ruff", "check", *(["--fix"] if fix else []), ".")
    run(session, "ruff", "format", *([] if fix else ["--check"]), ".")


@in_workspace
def imports(session: nox.Session) -> None:
    """Check who may import whom, from the source alone."""
    run(session, "lint-imports", "--no-cache")


@in_workspace
def types(session: nox.Session) -> None:
    """Check the types of all packages with mypy's strict mode."""
    run(session, "mypy", *session.posargs)


@in_workspace
def docs(session: nox.Session) -> None:
    """Check that documented code and recipes run, links resolve, public names are documented, and house rules hold."""
    run(session, "pytest", "tools", *SIDE_BY_SIDE, "-k", "not example_runs", *session.posargs, env=ONE_THREAD)


@nox.session
def site(session: nox.Session) -> None:
    """Build the documentation as a site, `.cache/site/index.html`; a link or an anchor that leads nowhere fails.

    It needs none of our packages: the API reference is read from their source. `-- serve` shows it while you write.
    """
    session.install("-r", SITE)
    session.run("mkdocs", *(session.posargs or ("build",)), env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(venv_backend="none", requires=["workspace", "site"])
def pages(session: nox.Session) -> None:
    """Look at README, site and the demo's report in Chromium, wide and narrow; screenshots go to `reports/pages`.

    A page that scrolls sideways, a cut cell, an image without text, or what axe finds against WCAG AA fails. Of the
    site those pages are looked at that KPT_PAGES names, as in `reference/kpt-moe.html`; all of them if it is empty.
    """
    if (chromium := shutil.which("chromium")) is None or shutil.which("npm") is None:
        session.error("install Chromium and npm (Node 20 or newer), on Debian: apt-get install chromium npm")
    folder, report = Path(".nox/pages").absolute(), REPORTS / "pages"
    shutil.copytree("tools/pages", folder, dirs_exist_ok=True)
    shutil.rmtree(report, ignore_errors=True)
    report.mkdir(parents=True)
    session.run("npm", "ci", "--prefix", folder, "--no-audit", "--no-fund", "--prefer-offline", external=True)
    run(session, "kpt", "demo", "--quick", "--output", report / "demo", silent=True)
    page, named = report / "demo" / "report.html", os.environ.get(KPT_PAGES, "").split()
    session.run("node", folder / "check.mjs", chromium, ".", page, report, *named, external=True)


@in_workspace
def aot(session: nox.Session) -> None:
    """Test the kit that compiles for chips that aren't here, by every vendor's compiler."""
    run(session, "pytest", "packages/kpt-conformance/tests/aot", *session.posargs, env={"KPT_AOT": "1"})


class Asked:
    """What follows `--` of a hardware target's session, and where its report goes.

    Attributes:
        whole: leave nothing out, as `nox -s full` asks.
        rest: what is handed on to pytest, or to `tools/gpu`.
        report: folder.
    """

    def __init__(self, session: nox.Session) -> None:
        parser = argparse.ArgumentParser(prog=f"nox -s {session.name} --", allow_abbrev=False)
        parser.add_argument("--whole", action="store_true", help="leave nothing out")
        parser.add_argument("--only", action="append", metavar="PART", help="may be repeated")
        options, self.rest = parser.parse_known_args(session.posargs)
        self.whole: bool = options.whole
        self.report = REPORTS / session.name
        self.report.mkdir(parents=True, exist_ok=True)
        self._only: list[str] | None = options.only

    def for_part(self, part: str) -> bool:
        """Return whether a part is to be run."""
        return self._only is None or part in self._only


def suite(session: nox.Session, backend: str, *options: str, env: Mapping[str, str] | None = None) -> None:
    """Run the conformance suite over a backend; `-k` may leave none of it."""
    variables = {**ONE_THREAD, **(env or {})}
    command = (f"--kpt-backend={backend}", "-q", *SIDE_BY_SIDE, *options)
    run(session, "pytest", *command, env=variables, success_codes=[0, 5])


def prove(
    session: nox.Session,
    asked: Asked,
    backend: str,
    name: str,
    *options: str,
    env: Mapping[str, str] | None = None,
    some: str = f"not ({MODELS})",
    values: bool = True,
    trials: int = 6,
) -> None:
    """Hold a backend's kernels to the suite: all values, a few trials of every other check, more of what changed.

    Args:
        session: that runs it.
        asked: what follows `--`; with `--whole` everything is run.
        backend: its name.
        name: of the report.
        *options: of pytest.
        env: variables.
        some: for `-k`: what is tried without `--whole`.
        values: compare values of every case; else of a few, as by the other checks.
        trials: of every other check and kernel; twice as many where a kernel's module changed.
    """
    if not asked.for_part("suite"):
        return
    reports = asked.report.absolute() / name
    if ops := os.environ.get(KPT_OPS, "").split():
        some = f"{begins(ops)} and {some}"
    if asked.whole or asked.rest:
        suite(session, backend, *options, f"--kpt-report={reports}.json", *asked.rest, env=env)
        return
    quick = ["--kpt-quick", "--kpt-quick-seconds=0", f"--kpt-quick-trials={trials}", f"--kpt-report={reports}.json"]
    if values:
        quick.append("--kpt-quick-values")
    # A kernel's tests are named for the module that it lies in.
    quick += [f"--kpt-quick-changed={name}" for name in changed_modules()]
    suite(session, backend, *options, *quick, "-k", some, env=env)


def begins(ops: Iterable[str]) -> str:
    """Return an expression for `-k` that has the tests of ops whose names begin so."""
    return f"({' or '.join(f'{op}.' for op in ops)})"


def changed_modules() -> list[str]:
    """Return the modules that changed as kernels' tests are named for them; C++ is that of every native kernel."""
    files = changed_files()
    if any(file.parts[:3] == ("packages", "kpt-backend-cpu", "native") for file in files):
        files += Path("packages/kpt-backend-cpu/src/kpt_backend_cpu").glob("*/*.py")
    return sorted({".".join(file.with_suffix("").parts[3:]) for file in files if kernel_module(file)})


def kernel_module(file: Path) -> bool:
    """Tell whether a file may define a kernel."""
    return file.parts[2:3] == ("src",) and file.suffix == ".py" and file.name != "__init__.py"


def changed_files(*packages: str) -> list[Path]:
    """Return the files of some packages, or of all, that what is landed may have changed (tools/affected.py)."""
    told = affected.changed_files() or []
    folders = tuple(f"packages/{package}/" for package in packages) or ("packages/",)
    return [Path(file) for file in told if file.startswith(folders) and Path(file).exists()]


def rows(session: nox.Session, asked: Asked, gate: str, *others: str, triton: Path | None = None) -> None:
    """Compile a target's kernels for the chips that it claims, and check what each must be.

    Args:
        session: that runs it.
        asked: with `whole` every configuration, for every chip.
        gate: the chip for which the default configurations are compiled.
        *others: chips for which they are, too, of a feature whose Triton kernels changed.
        triton: the folder of a Triton to take in the place of the workspace's.
    """
    if not asked.for_part("rows"):
        return
    env = {} if triton is None else {"PYTHONPATH": str(triton.absolute())}
    command = ("python", "-m", "kpt_conformance.aot", "--backend", session.name, "--report")
    if asked.whole:
        run(session, *command, asked.report / "compiled.json", env=env)
        return
    ops = ops_compiled_anew(session)
    own = [op for op in ops if any(map(kernel_module, files_of(op)))]
    rest = [op for op in ops if op not in own]
    tries: list[tuple[str, list[str], list[str]]] = [
        ("compiled", rest, [gate]),
        ("compiled-for-more", own, [gate, *others]),
    ]
    for name, some, chips in tries:
        chosen = [*(f"--chip={chip}" for chip in chips), *(f"--op={op}." for op in some)]
        if some:
            tiles = {"KPT_AOT_TILES": "usual", **env}
            run(session, *command, asked.report / f"{name}.json", *chosen, env=tiles)


def ops_compiled_anew(session: nox.Session) -> list[str]:
    """Return how the ops begin whose kernels for a target, or what compiles and checks these, may have changed."""
    told = affected.changed_files()
    of = (f"kpt-backend-{session.name}", "kpt-conformance")
    # packages/kpt-triton/src/kpt_triton/chips.py, for instance; those of a feature lie in its folder.
    everywhere = [file for file in changed_files("kpt-triton") if len(file.parts) == 5]
    if told is None or COMPILERS in told or any(map(kernel_module, [*everywhere, *changed_files(*of)])):
        return list(affected.FEATURES.values())
    return [op for op in affected.FEATURES.values() if any(map(kernel_module, files_of(op)))]


def files_of(op: str) -> list[Path]:
    """Return the changed files of kpt-triton that lie in the folder of a feature, by how its ops begin."""
    return [file for file in changed_files("kpt-triton") if file.parts[4:5] == (op,)]


def examples(session: nox.Session, asked: Asked, others: Iterable[str] = ()) -> None:
    """Run the programs in examples/ that are named for a target; with `others`, those that are for none of these."""
    if asked.for_part("examples"):
        named = " and ".join(f"not {name}_" for name in others) or f"{session.name}_"
        chosen = ("-k", f"example_runs and {named}", *([] if asked.whole else ["-m", "not slow"]))
        run(session, "pytest", "tools/test_docs.py", "-q", *SIDE_BY_SIDE, *chosen, env=ONE_THREAD)


def machine(session: nox.Session, asked: Asked) -> None:
    """Add to the report what machine it was."""
    told = run_for_output(BIN / "kpt", "doctor", "--json")
    (asked.report / "machine.json").write_text(told)
    session.log(f"report: {asked.report}")


def run_for_output(*command: str | Path) -> str:
    """Return what a command prints."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


@in_workspace
def cpu(session: nox.Session) -> None:
    """Prove of the CPU's kernels what this machine can: in C++ under sanitizers, on drawn input, by the suite.

    The suite is for the machine's best instruction set; of the others it compares values, on few cases. Those and what
    sanitizers find are left out where nothing of kpt-backend-cpu changed.
    """
    asked = Asked(session)
    # Sanitizers find faults of C++ alone, and which instruction set is taken is told in C++ and in that package alone.
    own = asked.whole or affected.changed_files() is None or bool(changed_files("kpt-backend-cpu"))
    if asked.for_part("native") and own:
        run(session, "python", f"{NATIVE}/sanitize.py")
        run(session, "pytest", NATIVE)
    found = run_for_output(BIN / "python", "-c", "from kpt_backend_cpu.native import library; print(*library().there)")
    for place, name in enumerate(found.split()):
        env = {"KPT_CPU_ISA": name}
        if place == 0 or asked.whole:
            prove(session, asked, "cpu", name, env=env)
        elif asked.for_part("suite") and own:
            report = asked.report.absolute() / f"{name}.json"
            few = ("--kpt-quick", "--kpt-quick-seconds=0", "-k", "values", f"--kpt-report={report}")
            suite(session, "cpu", *few, env=env)
    examples(session, asked, others=["nvidia", "amd", "xpu"])
    machine(session, asked)


@nox.session(venv_backend="none", requires=["workspace"], default=False)
def arm(session: nox.Session) -> None:
    """Compile the CPU's kernels for ARM and run their C++ tests in QEMU. Not in CI: an emulator takes minutes.

    Debian's cross compiler and emulator are needed; they are installed where they are missing and this is root.
    """
    missing = [package for package, program in CROSS.items() if shutil.which(program) is None]
    if missing:
        install = ("apt-get", "install", "--yes", "--no-install-recommends", *missing)
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            session.error(f"install a cross compiler and an emulator, on Debian: {' '.join(install)}")
        session.run(*install, external=True, silent=True)
    under = ("--libraries", ".nox/arm", "--under", "qemu-aarch64 -L /usr/aarch64-linux-gnu")
    run(session, "python", f"{NATIVE}/sanitize.py", *under, env={"KPT_CPU_TARGET": "aarch64"})


@in_workspace
def nvidia(session: nox.Session) -> None:
    """Prove of the NVIDIA kernels what this machine can: interpreted, compiled for every chip, and on a GPU.

    Interpreted means in float32 and bfloat16, without real models' sizes and drawn cases of options; tiles that are
    neither a default nor the only one of their kind are compiled with `--whole` alone. Of a feature (attention, fp8,
    moe) whose kernels changed all values are compared, and sm90 and sm120 compiled for; of others values of a few cases
    are compared, and where what all share changed, sm90 is compiled for. `--whole` leaves nothing out.
    """
    asked = Asked(session)
    # Products that the vendor's library alone has are shown on a GPU, and by kpt-fp8's tests as it is documented.
    ours = "not gpu_scaled_mm_blocks"
    some = f"(float32 or bfloat16) and {ours} and not ({MODELS})"
    options, env = ("--kpt-device=cpu", "-k", ours), {"TRITON_INTERPRET": "1"}
    ops = list(affected.FEATURES.values())
    own = ops if asked.whole or asked.rest else [op for op in ops if any(map(kernel_module, files_of(op)))]
    few = [op for op in ops if op not in own]
    if own:
        prove(session, asked, "nvidia", "interpreted", *options, env=env, some=f"{begins(own)} and {some}", trials=2)
    if few:
        named = f"{begins(few)} and {some}"
        prove(session, asked, "nvidia", "interpreted-few", *options, env=env, some=named, values=False, trials=2)
    rows(session, asked, "sm90", "sm120")
    examples(session, asked)
    machine(session, asked)
    if shutil.which("nvidia-smi") and "GPU 0" in run_for_output("nvidia-smi", "-L"):
        on_gpu(session, asked, "nvidia")


@in_workspace
def amd(session: nox.Session) -> None:
    """Compile the Triton kernels for AMD's chips, check what each must be, and run the suite on a GPU where one is.

    Their numbers are shown by `nvidia`: in the interpreter the kernels are the same. Chips other than gfx942 are
    compiled with `--whole` alone.
    """
    asked = Asked(session)
    rows(session, asked, "gfx942")
    examples(session, asked)
    if Path("/dev/kfd").exists():
        on_gpu(session, asked, "amd")


@in_workspace
def xpu(session: nox.Session) -> None:
    """Compile the Triton kernels for Intel's GPUs to SPIR-V, check what each must be, and run the suite where one is.

    Their numbers are shown by `nvidia`: in the interpreter the kernels are the same. Chips other than `pvc` are
    compiled with `--whole` alone. Intel's Triton lies by itself: it would take the place of the other.
    """
    asked = Asked(session)
    folder = Path(".nox/xpu")
    if not folder.exists():
        pinned = Path("constraints/xpu.txt").read_text().splitlines()[-1]
        run(session, "python", "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, pinned)
    rows(session, asked, "pvc", triton=folder)
    examples(session, asked)
    if shutil.which("xpu-smi"):  # /dev/dri alone may be a laptop's display
        on_gpu(session, asked, "xpu")


@nox.session(default=False)
def ipex(session: nox.Session) -> None:
    """Hold IPEX's kernel to the whole suite, beside torch 2.8. Not in CI: that torch brings 3 GB of CUDA libraries."""
    asked = Asked(session)
    wanted = (*requirements("kpt-backend-xpu", "kpt-conformance"), "torch", "intel_extension_for_pytorch")
    session.install("-c", IPEX, "--build-constraint", PINS, *wanted, "pytest-timeout", "pytest-xdist")
    report = f"--kpt-report={asked.report.absolute() / 'ipex.json'}"
    session.run("pytest", "--kpt-backend=ipex", "-q", *SIDE_BY_SIDE, report, *asked.rest, env=ONE_THREAD)


@nox.session(default=False, requires=["workspace"])
def tpu(session: nox.Session) -> None:
    """Prove of the Pallas kernels what this machine can. Not in CI: torch-xla's torch brings 3 GB of CUDA libraries.

    They are compiled for v5e, with `--whole` for every TPU; interpreted by JAX under the suite; and run through
    torch-xla on XLA's CPU: one step of training, experts and heads over four devices, and checks of small cases.
    """
    asked = Asked(session)
    rows(session, asked, "v5e")
    by_jax = {"JAX_PLATFORMS": "cpu"}
    prove(session, asked, "tpu", "interpreted", "--kpt-device=cpu", env=by_jax, values=False, trials=4)
    if asked.for_part("xla"):
        wanted = (*requirements("kpt-backend-tpu", "kpt-conformance"), *extra_of("kpt-backend-tpu", "xla"))
        session.install("-c", TORCH_XLA, "--build-constraint", PINS, *wanted, "pytest-timeout", "pytest-xdist")
        env = {**ONE_THREAD, "PJRT_DEVICE": "CPU", "KPT_TPU_INTERPRET": "1"}
        tests = "packages/kpt-backend-tpu/tests"
        with_xla = [f"{tests}/test_{name}.py" for name in ("torch_xla", "behaviours", "tpu_backend")]
        session.run("pytest", *with_xla, "-W", "default", env=env)
        session.run("python", "examples/tpu_integration.py", env=env)
        session.run("pytest", f"{tests}/test_spmd.py", "-W", "default", env={**env, "CPU_NUM_DEVICES": "4"})
        # XLA compiles every case anew. torch_xla is imported first: before that no tensor can lie on `xla`.
        few = ("-p", "torch_xla", "-W", "default", "-k", ON_XLA, *SIDE_BY_SIDE)
        session.run("pytest", "--kpt-backend=tpu", "-q", *few, env=env)


def on_gpu(session: nox.Session, asked: Asked, vendor: str) -> None:
    """Build the wheels and prove with them what only a GPU can prove (docs/gpu.md); of other vendors' the suite."""
    if not asked.for_part("gpu"):
        return
    folder = Path(f".nox/gpu-{vendor}").absolute()  # by itself: in the workspace is the Triton of constraints/aot.txt
    python = folder / "bin" / "python"
    if not python.exists():
        session.run(sys.executable, "-m", "virtualenv", folder, external=True)
    needed = (
        *("torch", "transformers", "typer", "rich", "safetensors", "numpy", "nvidia-ml-py"),
        *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
    )
    if vendor in INDEXES:
        session.run(python, "-m", "pip", "install", "torch", "--index-url", INDEXES[vendor], external=True)
        session.run(python, "-m", "pip", "install", *needed, external=True)
    else:
        session.run(python, "-m", "pip", "install", "-c", PINS, *needed, external=True)
    wheelhouse = folder / "wheels"
    shutil.rmtree(wheelhouse, ignore_errors=True)
    for package in PACKAGES:
        build = ("-m", "build", "--wheel", "--outdir", wheelhouse, f"packages/{package}")
        run(session, "python", *build, env=PINNED_BUILD)
    out = asked.report / "gpu"
    for command in ("prove", "suite") if vendor == "nvidia" else ("suite",):
        more = ("--backend", vendor, "--wheels", wheelhouse, "--out", out)
        session.run(python, "tools/gpu", command, *more, *asked.rest, external=True)


@in_workspace
def conformance(session: nox.Session) -> None:
    """Hold the references and the kernels in plain PyTorch, which run anywhere, to the conformance suite."""
    asked = Asked(session)
    run(session, "python", "-m", "kpt_conformance.coverage", "--json", asked.report / "coverage.json", silent=True)
    prove(session, asked, "reference", "reference", values=False)
    prove(session, asked, "torch", "torch")


@nox.session(venv_backend="none", requires=["workspace"], default=False)
def full(session: nox.Session) -> None:
    """Run everything with nothing left out, for a release: hours on two cores. Reports are in `reports/`."""
    for name in ("lint", "imports", "types", "docs", "site", "pages", "serve", "ray", "aot", "wheels", "demo", "bench"):
        session.notify(name)
    for name in ("tests", "conformance", "cpu", "nvidia", "amd", "xpu"):
        session.notify(name, ["--whole"])


@nox.session
def demo(session: nox.Session) -> None:
    """Run `kpt demo` where only kpt-all is installed, as a user has it; what follows `--` is handed to it."""
    made = Path(session.bin, "kpt")
    sources = (path for pattern in ("*/src/**/*.py", "*/native/*") for path in Path("packages").glob(pattern))
    newest = max(path.stat().st_mtime for path in sources)
    if not made.exists() or made.stat().st_mtime < newest:
        session.log("Installing torch for CPUs, transformers and KPT: 1.1 GB on disk, in one to three minutes,")
        session.log("one of them for the C++ compiler that makes the CPU's kernels (GCC 12+ or Clang 15+).")
        # Not silent, so that nobody wonders whether it hangs.
        session.install("--no-compile", "-c", PINS, "--build-constraint", PINS, ".", silent=False)
    # Bytecode of what runs is kept, so that the processes that measure memory need not compile it again.
    session.run("kpt", "demo", *session.posargs, env={"PYTHONDONTWRITEBYTECODE": None})


@in_workspace
def bench(session: nox.Session) -> None:
    """Measure the CPU's kernels beside their peers, with `-- --against REV` another revision's, or `-- --pytest` alone.

    Options follow. `--pytest` hands them to pytest, which `--quick` also runs, on one case.
    """
    arguments = [argument for argument in session.posargs if argument != "--pytest"]
    alone = len(arguments) < len(session.posargs)
    compared = any(argument.startswith("--against") for argument in arguments)
    if not alone:
        run(session, "python", f"benchmarks/{'against' if compared else 'bench'}.py", *arguments)
    if alone or ("--quick" in arguments and not compared):
        few = f"grouped_mm and {'granite' if alone else 'small'} and float32 and not (wgrad or scaled)"
        chosen = arguments if alone else []
        folder = Path("reports/bench")
        folder.mkdir(parents=True, exist_ok=True)
        short = ("--benchmark-max-time=0.2", "--benchmark-min-rounds=3", f"--benchmark-json={folder / 'pytest.json'}")
        # What is asked for comes last, and counts.
        run(session, "pytest", "--kpt-backend=cpu", "--kpt-bench", "-k", few, *short, *chosen)


#: Builds take place in environments that pip makes, which look for their constraints here.
PINNED_BUILD = {"PIP_CONSTRAINT": PINS, "PIP_BUILD_CONSTRAINT": PINS}


@nox.session(reuse_venv=False)
def wheels(session: nox.Session) -> None:
    """Build every sdist and wheel, install the wheels in a clean environment and try them there."""
    shutil.rmtree(DIST, ignore_errors=True)
    session.install("-c", PINS, "build", "hatchling", "pytest")
    # What the workspace compiled of the very sources that a source distribution holds is not compiled again.
    env = {"KPT_CPU_BUILT": str(LIBRARIES.absolute())}
    for package in PACKAGES:
        # Nothing else is here yet, so an environment for each build would only take time.
        session.run("python", "-m", "build", "--no-isolation", "--outdir", DIST, f"packages/{package}", env=env)
    # Wheels are named by path, so that no sibling can come from an index. First what must suffice by itself.
    for package in ("kpt-core", "kpt-moe", "kpt-fp8", "kpt-attention"):
        (built,) = map(str, DIST.glob(f"{package.replace('-', '_')}-*.whl"))
        session.install("-c", PINS, built)
        session.run("python", "tools/check_alone.py", package)
        if package != "kpt-core":
            session.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", package)
    session.install("-c", PINS, *map(str, sorted(DIST.glob("*.whl"))), "hypothesis", "hatchling")
    session.run("python", "-m", "pip", "check")
    session.run("python", "tools/check_wheels.py", DIST)
    session.run("python", "tools/check_native.py")
    session.run("pytest", OUT_OF_TREE, env={"KPT_WHEELS": str(DIST.absolute())})
    root = Path.cwd()
    session.chdir(session.create_tmp())  # away from the source
    session.run("python", "-m", "kpt_core")
    session.run("kpt", "doctor")
    # The backend that `kpt new` writes is complete: nothing is added before the suite runs.
    session.run("kpt", "new", "backend", "skeleton")
    session.chdir("kpt-backend-skeleton")
    session.run("python", "-m", "pip", "install", "--no-index", "--no-build-isolation", ".")
    session.run("pytest", "--kpt-quick", env=ONE_THREAD)
    without_compiler(session, root)


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build one package as a release has it, and check it: `nox -s release -- kpt-moe --tag kpt-moe-v0.2.0`.

    Version, changelog and tag agree, the index can show the description, and wheel and source hold what they should.
    Without `--tag` the changelog may still say (unreleased). Nothing is uploaded: a tag does that (docs/releases.md).
    """
    if not session.posargs or session.posargs[0] not in PACKAGES:
        session.error(f"name one of {', '.join(PACKAGES)}: nox -s release -- kpt-moe")
    package, *options = session.posargs
    session.install("-c", PINS, "-c", RELEASE, "build", "hatchling", "twine", "check-jsonschema")
    for schema, files in SCHEMAS.items():
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
    shutil.rmtree(DIST, ignore_errors=True)
    session.run("python", "-m", "build", "--no-isolation", "--outdir", DIST, f"packages/{package}")
    session.run("twine", "check", "--strict", *map(str, DIST.iterdir()))
    session.run("python", "tools/check_release.py", package, DIST, *options)


def without_compiler(session: nox.Session, root: Path) -> None:
    """Put a wheel of the native kernels that was built without a compiler in the place of the other, and try it."""
    session.chdir(root)
    pure = Path(session.create_tmp(), "pure").absolute()
    shutil.rmtree(pure, ignore_errors=True)
    # From the source distribution: the libraries beside the source stay.
    (source,) = DIST.glob("kpt_backend_cpu-*.tar.gz")
    env = PINNED_BUILD | {"KPT_CPU_BUILD": "0"}
    session.run("python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", pure, source, env=env)
    session.install("--no-deps", "--force-reinstall", *map(str, pure.glob("*.whl")))
    session.run("python", "tools/check_wheels.py", pure)
    session.run("python", "tools/check_native.py", "KPT_CPU_BUILD=0")


@nox.session(default=False)
@nox.parametrize("package", [nox.param(package, id=package) for package in ("kpt-core", "kpt-moe")])
def lowest(session: nox.Session, package: str) -> None:
    """Test with the oldest supported requirements. Not in CI: the old torch brings several GB of CUDA libraries."""
    session.install("-c", FLOORS, "--build-constraint", PINS, *requirements(package))
    # The deprecation warnings of an old torch are no business of ours.
    tests = (f"packages/{package}/tests", f"--ignore={OUT_OF_TREE}", "-W", "default")
    session.run("pytest", *tests, *session.posargs, env={"HF_HUB_OFFLINE": "1"})


@nox.session(default=False, reuse_venv=False)
def pins(session: nox.Session) -> None:
    """Resolve every requirement anew, torch excepted, and rewrite constraints/cpu.txt; test and commit the result."""
    lines = Path(PINS).read_text().splitlines()
    header = [line for line in lines if line.startswith("#")]
    torch = next(line for line in lines if line.startswith("torch=="))
    session.install(torch, *requirements(*PACKAGES), *extra("bench"), *TOOLS, "editables", "hatchling")
    frozen = str(session.run("python", "-m", "pip", "freeze", "--exclude-editable", silent=True))
    pinned = [re.sub(r"\+\w+$", "", line) for line in frozen.splitlines() if "==" in line]
    Path(PINS).write_text("\n".join([*header, *pinned]) + "\n")
