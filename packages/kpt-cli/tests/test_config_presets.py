"""The presets that are shipped: each key of them changes what a command does."""

import dataclasses
import json
import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kpt_cli import settings
from kpt_cli.errors import CliError
from kpt_core.dispatch.settings import effective
from kpt_optimize.config import PRESETS, Config

SHIPPED = {path.stem: tomllib.loads(path.read_text()) for path in settings._FOLDER.glob("*.toml")}
#: How a command is called, and what does its work: what is handed to it is what the command would do.
WORK = {
    "": (["doctor"], "kpt_cli.doctor.examine"),
    "kpt": (["doctor"], "kpt_cli.doctor.examine"),
    "serve": (["toy"], "kpt_serve.oip.server.serve"),
    "tune": (["moe.experts"], "kpt_optimize.tuning.run.tune"),
    "optimize": (["MODEL"], "kpt_cli.optimize.command._measure"),
    "demo": ([], "kpt_cli.demo.run.run_demo"),
    "plan": (["MODEL", "--target", "MI300X"], "kpt_optimize.forecast.forecast"),
    "bench moe": ([], "kpt_cli.bench.moe.run"),
    "bench moe-training": ([], "kpt_cli.bench.moe.run"),
    "bench attention": ([], "kpt_cli.bench.attention.contests"),
    "bench fp8": ([], "kpt_cli.bench.fp8.contests"),
    "validate record": (["MODEL", "-o", "trace.safetensors"], "kpt_cli.validate.replaying.record"),
}


def keys(table: dict[str, Any], words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, value in table.items():
        found += keys(value, (*words, name)) if isinstance(value, dict) else [(*words, name)]
    return found


KEYS = [(preset, *path) for preset, table in SHIPPED.items() for path in keys(table)]


def plain(value: Any) -> Any:
    """Return what is the same in every run."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    known = isinstance(value, bool | int | float | str | None) or dataclasses.is_dataclass(value)
    return repr(value) if known else type(value).__name__


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(settings._FOLDER, tmp_path / "presets")
    monkeypatch.setattr(settings, "_FOLDER", tmp_path / "presets")
    return tmp_path


@pytest.mark.parametrize("path", KEYS, ids=".".join)
def test_each_key_changes_what_a_command_does(path, kpt, folder, mixtral, monkeypatch):
    preset, *words, key = path
    arguments, work = WORK[" ".join(words)]
    monkeypatch.setattr("kpt_cli.validate.command._load", lambda *given: (None, None, "nothing"))
    seen: list[Any] = []

    def noted(*given: Any, **named: Any) -> None:
        seen.append((plain(given), {name: plain(value) for name, value in named.items()}, effective()))
        raise CliError("that is enough")

    monkeypatch.setattr(work, noted)
    command = [*(words if words != ["kpt"] else []), *(str(mixtral) if each == "MODEL" else each for each in arguments)]

    def does() -> tuple[Any, bool]:
        seen.clear()
        result = kpt("--preset", preset, *command)
        assert len(seen) == 1, result.output
        return seen[0], "Traceback" in result.stderr

    with_key = does()
    assert does() == with_key
    file = folder / "presets" / f"{preset}.toml"
    table = "".join(rf"\[{re.escape('.'.join(words))}\]\n(?:.+\n)*?" if words else "")
    text, count = re.subn(rf"(?m)^({table}){re.escape(key)} = .*\n", r"\1", file.read_text())
    assert count == 1
    file.write_text(text)
    assert does() != with_key


def test_presets_agree_with_those_of_the_library(kpt, folder):
    assert SHIPPED.keys() == PRESETS.keys() == set(settings.PRESETS)
    for preset, config in PRESETS.items():
        rows = json.loads(kpt("--preset", preset, "config", "show", "optimize", "--json").stdout)["options"]
        of = {row["option"]: row["value"] for row in rows}
        library = SHIPPED[preset].get("kpt", {})
        assert config == Config(
            use=library.get("use"),
            disable=tuple(library.get("disable", ())),
            strict=library.get("strict", False),
            level=of["--level"],
            objective=of["--objective"],
            max_error=of["--max-error"],
        )


def test_doctor_obeys_a_preset_and_says_so(kpt, folder, monkeypatch):
    def report(*root: str) -> dict[str, Any]:
        return json.loads(kpt(*root, "doctor", "--json").stdout)

    def runs(found: dict[str, Any]) -> set[str]:
        return {kernel for op in found["ops"] for serving in op["servings"] for kernel in serving["runs"]}

    assert len(runs(report())) > 1
    found = report("--preset", "development")
    assert runs(found) == {"reference"}
    assert found["set_by"] == {"KPT_USE": "preset development", "KPT_STRICT": "preset development"}
    assert "KPT_USE=reference (preset development)" in kpt("--preset", "development", "doctor").stdout
    fast = sorted(runs(report()) - {"reference"})
    (folder / "kpt.toml").write_text(f"[kpt]\nuse = 'torch'\ndisable = {fast[:2]}\nstrict = false\n")
    found = report("--preset", "development")
    assert found["environment"] == {"KPT_USE": "torch", "KPT_DISABLE": ",".join(fast[:2]), "KPT_STRICT": "0"}
    assert runs(found) == {*fast[2:], "reference"}
    (folder / "kpt.toml").unlink()
    monkeypatch.setenv("KPT_USE", "")  # empty, so free
    assert runs(report("--preset", "development")) == {*fast, "reference"}
    assert "KPT_STRICT" not in os.environ  # afterwards all is as before


def test_an_unknown_kernel_is_an_error_that_names_the_file(kpt, folder):
    (folder / "kpt.toml").write_text("[kpt]\nuse = 'referense'\n")
    result = kpt("bench", "fp8", "--quick", "--dtype", "bfloat16")
    assert result.exit_code == 2
    assert "KPT_USE is set by file kpt.toml" in " ".join(result.stderr.split())


def test_an_option_that_contradicts_a_preset_is_told_with_its_source(kpt, folder, monkeypatch):
    result = kpt("--preset", "training", "bench", "attention", "--flex")
    assert result.exit_code == 2
    assert "(--train is set by preset training)" in result.stderr
    monkeypatch.setenv("KPT_BENCH_ATTENTION_TRAIN", "0")
    monkeypatch.setattr("kpt_cli.bench.attention.contests", lambda *given, **named: 1 / 0)
    assert isinstance(kpt("--preset", "training", "bench", "attention", "--flex").exception, ZeroDivisionError)
