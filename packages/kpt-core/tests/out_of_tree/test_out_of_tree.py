"""A backend from outside the repository serves, is refused, fails and goes, without a change to KPT. See README.md."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

SAMPLE = Path(__file__).parent / "kpt_backend_sample"
WHEELS = os.environ.get("KPT_WHEELS")
#: What of KPT is installed beside the sample, as far as there are wheels of it.
OURS = ("kpt-core", "kpt-moe", "kpt-cli")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS, reason="KPT_WHEELS names no folder of wheels of kpt-core, kpt-moe and kpt-cli"),
]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command, whose errors are shown if it fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KPT_", "PYTHON"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(python: Path, *arguments: str | Path) -> None:
    """Run this interpreter's pip for another one."""
    quiet = ("--quiet", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, *quiet, *arguments, cwd=python.parent)


def borrow(source: Path, target: Path) -> None:
    """Link everything in a site-packages folder but KPT, so that neither its modules nor its entry points are seen."""
    target.mkdir(exist_ok=True)
    for entry in source.iterdir():
        if not re.search(r"(^|_)kpt[_-]", entry.name) and entry.suffix != ".pth":
            link = target / entry.name
            if not link.exists():
                link.symlink_to(entry)


@pytest.fixture(scope="module")
def sample_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    if importlib.util.find_spec("hatchling"):
        options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")
        run(sys.executable, "-m", "pip", "wheel", *options, out, SAMPLE, cwd=out)
    elif importlib.util.find_spec("build"):
        run(sys.executable, "-m", "build", "--wheel", "--outdir", out, SAMPLE, cwd=out)
    else:
        pytest.skip("neither hatchling nor build is installed, one of which builds the sample's wheel")
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(sample_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a clean environment with KPT and the sample, from wheels."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    for name in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        borrow(Path(name), folder / "borrowed")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "borrowed.pth").write_text(f"{folder / 'borrowed'}\n")
    assert WHEELS is not None
    wheels = Path(WHEELS).resolve()
    built = [name for name in OURS if list(wheels.glob(f"{name.replace('-', '_')}-*.whl"))]
    assert "kpt-core" in built, f"no wheel of kpt-core in {wheels}"
    pip(python, "install", "--no-index", "--find-links", wheels, *built, sample_wheel)
    return python


PREAMBLE = """
import importlib.util, json, sys, warnings
import torch
import kpt_core
assert kpt_core.__file__.startswith(sys.prefix), kpt_core.__file__
found = {}
"""


def ask(python: Path, script: str) -> dict[str, Any]:
    """Run a script in the clean environment; what it puts into `found` comes back."""
    out = run(python, "-I", "-c", f"{PREAMBLE}{script}\nprint(json.dumps(found))", cwd=python.parent)
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


def test_it_is_found(python: Path) -> None:
    found = ask(
        python,
        """
found["backends"] = {name: kpt_core.registry.origin(name) for name in kpt_core.backends()}
found["kernel imported"] = "kpt_backend_sample.grouped_mm" in sys.modules
found["ops"] = sorted(kpt_core.ops())
found["problems"] = [str(p) for p in kpt_core.registry.problems() if "sample" in str(p)]
""",
    )
    assert found["backends"]["sample"] == "kpt-backend-sample 0.1.0"
    assert not found["kernel imported"]
    assert "sample.softcap" in found["ops"]
    assert found["problems"] == []


def test_it_is_chosen(python: Path) -> None:
    found = ask(
        python,
        """
softcap = kpt_core.get_op("sample.softcap")
x = torch.linspace(-100, 100, 9, requires_grad=True)
found["explained"] = kpt_core.explain(softcap, x).as_dict()
with kpt_core.record() as log:
    out = softcap(x)
found["ran"] = log[0].as_dict()
with kpt_core.use("reference"):
    found["agrees"] = torch.allclose(softcap(x), out)
(grad,) = torch.autograd.grad(out.sum(), x)
found["gradient"] = bool((grad > 0).all())
with kpt_core.use("sample"):
    found["asked for"] = kpt_core.explain(softcap, x).backend
compiled = torch.compile(lambda x: softcap(x), fullgraph=True, backend="eager")
found["compiled"] = torch.equal(compiled(x), out)
""",
    )
    assert found["explained"] == found["ran"]
    assert found["ran"]["kernel"] == "kpt_backend_sample.softcap:kernel"
    assert found["agrees"]
    assert found["gradient"]
    assert found["asked for"] == "sample"
    assert found["compiled"]


def test_it_is_refused_with_its_sentence(python: Path) -> None:
    found = ask(
        python,
        """
softcap = kpt_core.get_op("sample.softcap")
x = torch.ones(3, 4).t()
selection = kpt_core.explain(softcap, x)
found["kernel"] = selection.kernel
found["refusals"] = [str(refusal) for refusal in selection.refusals]
found["computes"] = softcap(x).shape == x.shape
with kpt_core.use("sample"):
    try:
        softcap(x)
    except kpt_core.NoKernelError as error:
        found["error"] = str(error)
""",
    )
    assert found["kernel"] == "reference"
    assert found["refusals"] == [
        "sample (kpt_backend_sample.softcap:tensor_core_kernel): needs tensor_cores, which cpu lacks",
        "sample (kpt_backend_sample.softcap:kernel): x has strides [1, 4]; call x.contiguous() first",
    ]
    assert found["computes"]
    assert found["error"].splitlines()[1:] == [f"  {refusal}" for refusal in found["refusals"]]


def test_it_is_contained_when_it_raises(python: Path) -> None:
    found = ask(
        python,
        """
softcap = kpt_core.get_op("sample.softcap")
half = torch.ones(4, dtype=torch.float16)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found["values"] = [softcap(half)[0].item() for _ in range(3)]
found["warnings"] = [str(w.message) for w in caught]
found["half"] = kpt_core.explain(softcap, half).kernel
found["float"] = kpt_core.explain(softcap, half.float()).kernel
""",
    )
    assert found["values"] == pytest.approx([1.0] * 3, abs=1e-2)
    assert len(found["warnings"]) == 3  # then it is off
    for warning in found["warnings"]:
        assert warning.startswith(
            "kernel kpt_backend_sample.softcap:kernel raised RuntimeError: invalid device function"
        )
    assert (found["half"], found["float"]) == ("reference", "reference")


GROUPED_MM = """
if importlib.util.find_spec("kpt_moe"):
    grouped_mm = kpt_core.get_op("moe.grouped_mm")
    arguments = torch.randn(7, 4), torch.randn(3, 4, 5), torch.tensor([2, 2, 6], dtype=torch.int32)
    found["grouped_mm"] = kpt_core.explain(grouped_mm, *arguments).backend
    out = grouped_mm(*arguments)
    with kpt_core.use("reference"):
        found["agrees"] = torch.allclose(grouped_mm(*arguments), out, atol=1e-5)
"""


def test_it_serves_an_op_of_another_package(python: Path) -> None:
    found = ask(python, GROUPED_MM)
    if not found:
        pytest.skip(f"no wheel of kpt-moe in {WHEELS}")
    assert found == {"grouped_mm": "sample", "agrees": True}


def test_it_is_gone_once_uninstalled(python: Path, sample_wheel: Path) -> None:
    pip(python, "uninstall", "--yes", "kpt-backend-sample")
    try:
        found = ask(
            python,
            GROUPED_MM
            + """
found["backends"] = list(kpt_core.backends())
try:
    kpt_core.get_op("sample.softcap")
except kpt_core.UnknownNameError as error:
    found["op"] = str(error)
try:
    with kpt_core.use("sample"):
        pass
except kpt_core.UnknownNameError as error:
    found["use"] = str(error)
""",
        )
    finally:
        pip(python, "install", "--no-index", "--no-deps", sample_wheel)
    assert "sample" not in found["backends"]
    assert found["op"].startswith("unknown op 'sample.softcap'")
    assert found["use"].startswith("unknown backend or kernel 'sample'")
    assert found.get("grouped_mm", "torch") == "torch"
