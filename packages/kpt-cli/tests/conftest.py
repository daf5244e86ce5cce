"""What the tests of the command line share: a way to run it, tiny models, and plug-ins made on the spot."""

import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import kpt_core
import kpt_optimize
from kpt_cli.main import app
from kpt_core import registry
from kpt_optimize import Optimized
from model_files import save_mixtral

# The models are tiny: more threads would only wait for each other, longest where other processes run.
torch.set_num_threads(1)


#: Backends that may be installed beside the package under test, whose kernels would outrank those of the tests.
_BACKENDS = {"cpu", "nvidia", "amd", "tpu", "xpu", "ipex"}


def _without_backends(group: str) -> list[EntryPoint]:
    return [entry for entry in entry_points(group=group) if group != "kpt.backends" or entry.name not in _BACKENDS]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path_factory):
    """No variable of the person who runs the tests may matter, nor, in this process, a backend that is installed."""
    monkeypatch.setattr("kpt_core.discovery.entry_points", _without_backends)
    for name in list(os.environ):
        if name.startswith("KPT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))  # tuning tables
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kpt_core.refresh()
    yield
    monkeypatch.undo()
    kpt_core.refresh()


@pytest.fixture
def kpt() -> Callable[..., Result]:
    """Run the command line in this process."""

    def run(*arguments: object) -> Result:
        kpt_core.refresh()
        return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="kpt")

    return run


@pytest.fixture
def kpt_plugged(kpt, monkeypatch) -> Iterator[Callable[..., Result]]:
    """Run the command line in this process, with a folder of plug-ins on the import path, as one that just started."""
    monkeypatch.setattr(registry, "_ops", kpt_core.ops())  # those of plug-ins are taken back, and no others
    folders = set()

    def run(*arguments: object, plugins: Path) -> Result:
        folders.add(plugins)
        with monkeypatch.context() as patch, warnings.catch_warnings():
            patch.syspath_prepend(plugins)
            warnings.simplefilter("default")
            return kpt(*arguments)

    yield run
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) and Path(module.__file__).parent in folders:
            del sys.modules[name]


@pytest.fixture
def kpt_process(tmp_path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run the command line in a process of its own; `plugins` is a folder on its import path."""

    def run(*arguments: object, plugins: Path | None = None, env: dict[str, str] | None = None, **options):
        path = os.pathsep.join(filter(None, [str(plugins or ""), os.environ.get("PYTHONPATH", "")]))
        return subprocess.run(
            [sys.executable, "-W", "error::DeprecationWarning:kpt_cli", "-m", "kpt_cli", *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": path} | (env or {}),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            **options,
        )

    return run


@pytest.fixture
def install(tmp_path) -> Callable[..., Path]:
    """Make a fake installed distribution; returns the folder that must be on the import path."""

    def make(name: str, entry_points: str, **modules: str) -> Path:
        folder = tmp_path / "plugins"
        info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(textwrap.dedent(entry_points))
        for module, source in modules.items():
            (folder / f"{module}.py").write_text(textwrap.dedent(source))
        return folder

    return make


@pytest.fixture(scope="session")
def mixtral(tmp_path_factory) -> Path:
    """A Mixtral with two layers, in one safetensors file, without a tokenizer. Not to be changed."""
    return save_mixtral(tmp_path_factory.mktemp("models") / "mixtral")


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    """A model without experts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "llama"
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def optimized(tmp_path_factory, mixtral) -> dict:
    """One real run of `kpt optimize --json --copy ... -o ...`, for all tests that look at what it gives."""
    folder = tmp_path_factory.mktemp("optimized")
    arguments = ["optimize", mixtral, "--copy", folder / "out", "-o", folder / "plan.json", "--tokens", 64, "--json"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="kpt")
    assert result.exit_code == 0, result.output
    return {"folder": folder, "document": json.loads(result.stdout), "stderr": result.stderr}


@pytest.fixture
def quick_optimize(monkeypatch, optimized) -> Iterator[list[dict]]:
    """Give the plan of the one real run instead of measuring again; collects the arguments of each call."""
    plan = kpt_optimize.Plan.load(optimized["folder"] / "plan.json")
    first, *others = plan.entries
    plan = replace(plan, entries=(replace(first, kept=True), *others))  # whatever pays on a machine with other work
    calls: list[dict] = []

    def optimize(model, **options):
        calls.append({"model": model, **options})
        options["on_progress"](1, 2, "halfway")
        return Optimized(model, plan)

    monkeypatch.setattr(kpt_optimize, "optimize", optimize)
    return calls
