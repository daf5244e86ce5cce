"""Where the result goes: checked before any work, whole or not at all."""

import errno
import json
import os
import resource
import shutil
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

import kpt_optimize
from kpt_cli.optimize.model_directory import read_model_directory
from model_files import listing


@pytest.fixture
def model(mixtral, tmp_path):
    return shutil.copytree(mixtral, tmp_path / "mixtral")


def refused(kpt, tmp_path, *arguments):
    """What the command says when it refuses; it must leave everything as it was."""
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in listing(tmp_path)}
    result = kpt("optimize", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("kpt: error: ")
    assert result.stderr.count("\n") == 1
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in listing(tmp_path)} == before
    return result.stderr


def test_output_is_the_model_itself(kpt, model, tmp_path):
    assert "is the model's own folder" in refused(kpt, tmp_path, model, "--copy", model, "--force")


def test_output_is_the_model_behind_a_link(kpt, model, tmp_path):
    (tmp_path / "link").symlink_to(model)
    assert "is the model's own folder" in refused(kpt, tmp_path, model, "--copy", tmp_path / "link", "--force")


def test_output_inside_the_model(kpt, model, tmp_path):
    assert "lies inside the model's folder" in refused(kpt, tmp_path, model, "--copy", model / "out")


def test_model_inside_the_output(kpt, model, tmp_path):
    assert "contains the model's folder" in refused(kpt, tmp_path, model, "--copy", tmp_path, "--force")


def test_output_is_a_file(kpt, model, tmp_path):
    (tmp_path / "out").write_text("")
    assert "is a file" in refused(kpt, tmp_path, model, "--copy", tmp_path / "out", "--force")


def test_output_is_not_empty(kpt, model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "diary.txt").write_text("dear diary")
    assert "exists and is not empty; choose another folder, or replace it with --force" in refused(
        kpt, tmp_path, model, "--copy", tmp_path / "out"
    )
    assert "holds no model, so --force does not replace it" in refused(
        kpt, tmp_path, model, "--copy", tmp_path / "out", "--force"
    )


def test_parent_of_the_output_is_missing(kpt, model, tmp_path):
    assert f"the folder {tmp_path / 'a'} does not exist" in refused(
        kpt, tmp_path, model, "--copy", tmp_path / "a" / "b"
    )


def test_disk_is_too_small(kpt, model, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "and the disk has 1.0 kB free; make room" in refused(kpt, tmp_path, model, "--copy", tmp_path / "out")


def test_plan_file_is_a_folder(kpt, model, tmp_path):
    assert "expected a file name" in refused(kpt, tmp_path, model, "-o", tmp_path)


def test_plan_file_exists(kpt, model, tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    assert "replace it with --force" in refused(kpt, tmp_path, model, "-o", tmp_path / "plan.json")


def test_parent_of_the_plan_is_missing(kpt, model, tmp_path):
    assert "does not exist; make it first" in refused(kpt, tmp_path, model, "-o", tmp_path / "a" / "plan.json")


@pytest.mark.parametrize("option", ["--output", "--copy"])
def test_no_permission_is_found_before_the_work(kpt, model, tmp_path, monkeypatch, option):
    fail_at(monkeypatch, tempfile, "TemporaryFile", OSError(errno.EROFS, os.strerror(errno.EROFS)))
    assert "nothing can be written in" in refused(kpt, tmp_path, model, option, tmp_path / "out")


def fail_at(monkeypatch, owner, name, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.usefixtures("quick_optimize")
class TestFailureWhileWriting:
    FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model.safetensors")

    def test_disk_full_leaves_nothing(self, kpt, model, tmp_path, monkeypatch):
        fail_at(monkeypatch, shutil, "copyfile", self.FULL)
        before = listing(tmp_path)
        result = kpt("optimize", model, "--copy", tmp_path / "out", "-o", tmp_path / "plan.json")
        assert result.exit_code == 2
        assert "kpt: error: the disk is full" in result.stderr
        assert listing(tmp_path) == before

    def test_disk_full_keeps_what_was_there(self, kpt, model, tmp_path, monkeypatch):
        out = shutil.copytree(model, tmp_path / "out")
        fail_at(monkeypatch, shutil, "copyfile", self.FULL)
        before = listing(tmp_path)
        assert kpt("optimize", model, "--copy", out, "--force").exit_code == 2
        assert listing(tmp_path) == before

    def test_interrupt_leaves_nothing(self, kpt, model, tmp_path, monkeypatch):
        fail_at(monkeypatch, shutil, "copyfile", KeyboardInterrupt())
        before = listing(tmp_path)
        assert kpt("optimize", model, "--copy", tmp_path / "out").exit_code == 130
        assert listing(tmp_path) == before

    def test_output_that_appears_meanwhile_is_not_overwritten(self, kpt, model, tmp_path, monkeypatch):
        out = tmp_path / "out"
        copy = shutil.copyfile

        def meanwhile(source, target):
            out.mkdir(exist_ok=True)
            (out / "diary.txt").write_text("dear diary")
            return copy(source, target)

        monkeypatch.setattr(shutil, "copyfile", meanwhile)
        result = kpt("optimize", model, "--copy", out)
        assert result.exit_code == 2
        assert listing(out) == ["diary.txt"]
        assert listing(tmp_path) == sorted(
            ["out", "out/diary.txt", "mixtral", *(f"mixtral/{n}" for n in listing(model))]
        )

    def test_failed_exchange_puts_the_old_one_back(self, kpt, model, tmp_path, monkeypatch):
        out = shutil.copytree(model, tmp_path / "out")
        (out / "old").write_text("")
        rename = type(out).rename

        def once(self, target):
            if self.name.endswith(".partial"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
            return rename(self, target)

        monkeypatch.setattr(type(out), "rename", once)
        before = listing(tmp_path)
        result = kpt("optimize", model, "--copy", out, "--force")
        assert result.exit_code == 2
        assert "Input/output error" in result.stderr
        assert listing(tmp_path) == before


LIMITED = """
import sys
from pathlib import Path
from kpt_cli.optimize.model_directory import read_model_directory
from kpt_cli.optimize.command import copy_model
from kpt_cli.output_file import staged
from kpt_cli.errors import sentence
try:
    with staged(Path(sys.argv[2])) as staging:
        copy_model(read_model_directory(Path(sys.argv[1])), staging, "auto")
except OSError as error:
    sys.exit(sentence(error))
"""


def test_real_limit_of_the_system_leaves_nothing(model, tmp_path):
    import subprocess
    import sys

    size = read_model_directory(model).weight_bytes
    before = listing(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, model, tmp_path / "out"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "the disk is full or a size limit was hit" in done.stderr
    assert listing(tmp_path) == before


@pytest.mark.usefixtures("quick_optimize")
class TestWhatIsWritten:
    def test_weights_are_the_same_bytes(self, kpt, model, tmp_path):
        assert kpt("optimize", model, "--copy", tmp_path / "out").exit_code == 0
        for name in ("config.json", "model.safetensors", "generation_config.json"):
            assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
        assert listing(tmp_path / "out") == sorted([*listing(model), "kpt_plan.json"])

    def test_other_files_of_the_model_come_along_and_strangers_do_not(self, kpt, model, tmp_path):
        for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "LICENSE", "README.md"):
            (model / name).write_text("{}")
        for name in ("pytorch_model.bin", "modeling_mixtral.py", "other.safetensors", ".env", "kpt_plan.json"):
            (model / name).write_text("{}")
        (model / "original").mkdir()
        assert kpt("optimize", model, "--copy", tmp_path / "out").exit_code == 0
        assert set(listing(tmp_path / "out")) == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "chat_template.jinja",
            "LICENSE",
            "README.md",
            "kpt_plan.json",
        }
        assert json.loads((tmp_path / "out" / "kpt_plan.json").read_text())["model"] == "MixtralForCausalLM"

    def test_force_replaces_a_model(self, kpt, model, tmp_path):
        out = shutil.copytree(model, tmp_path / "out")
        (out / "old.txt").write_text("")
        assert kpt("optimize", model, "--copy", out, "--yes").exit_code == 0
        assert "old.txt" not in listing(out)
        assert "kpt_plan.json" in listing(out)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mixtral", "out"]

    def test_empty_folder_is_as_good_as_none(self, kpt, model, tmp_path):
        (tmp_path / "out").mkdir()
        assert kpt("optimize", model, "--copy", tmp_path / "out").exit_code == 0

    def test_relative_output(self, kpt, model, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert kpt("optimize", "mixtral", "--copy", "out").exit_code == 0
        assert "kpt_plan.json" in listing(tmp_path / "out")

    def test_dtype_is_noted_in_the_config(self, kpt, model, tmp_path):
        assert kpt("optimize", model, "--copy", tmp_path / "out", "--dtype", "bfloat16").exit_code == 0
        assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()

    def test_plan_alone(self, kpt, model, tmp_path):
        plan = tmp_path / "plan.json"
        result = kpt("optimize", model, "-o", plan)
        assert result.exit_code == 0
        assert f"Wrote the plan to {plan}" in result.stdout
        assert json.loads(plan.read_text())["entries"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mixtral", "plan.json"]

    def test_no_copy_of_a_model_that_stays_as_it_is(self, kpt, model, tmp_path, monkeypatch):
        optimize = kpt_optimize.optimize

        def nothing_kept(*given, **options):
            found = optimize(*given, **options)
            entries = tuple(replace(entry, kept=False) for entry in found.plan.entries)
            return replace(found, plan=replace(found.plan, entries=entries))

        monkeypatch.setattr(kpt_optimize, "optimize", nothing_kept)
        result = kpt("optimize", model, "--copy", tmp_path / "out")
        assert result.exit_code == 0
        assert "Nothing pays, so the model was not copied" in result.stdout
        assert "To run it" not in result.stdout
        assert json.loads(kpt("optimize", model, "--copy", tmp_path / "out", "--json").stdout)["copy"] is None
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mixtral"]
