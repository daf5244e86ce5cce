"""`kpt tune`: measures, writes, and says what it did."""

import json
from pathlib import Path

import pytest

from tuned_distribution import ENTRY_POINTS, SOURCE

PRODUCT = "tuned/tuned.product/tuned_plugin"


@pytest.fixture
def plugins(install):
    return install("tuned-plugin", ENTRY_POINTS, tuned_plugin=SOURCE)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    folder = tmp_path / "tables"
    monkeypatch.setenv("KPT_TUNING", str(folder))
    return folder


def test_the_winner_is_told_written_and_used(kpt_process, kpt_plugged, plugins, tables):
    done = kpt_process("tune", "tuned.product", "--seconds", "0.05", plugins=plugins)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for said in ("tuned.product", "model", "float32", "tuned_plugin:slow", "tuned_plugin:quick", "times=1", "faster"):
        assert said in text
    assert "tuned_plugin:wrong: its result is off by" in text
    assert "tuned_plugin:choosy: needs warp9, which cpu lacks" in text
    (table,) = tables.glob("*.json")
    assert f"Wrote {table}" in done.stdout
    (entry,) = json.loads(table.read_text())["entries"]
    assert (entry["kernel"], entry["config"]) == (f"{PRODUCT}:quick", {"times": 1})
    assert (entry["distribution"], entry["version"]) == ("tuned-plugin", "1.0")

    looked = kpt_plugged("doctor", plugins=plugins)
    assert "For some sizes of tuned.product, what `kpt tune` measured comes first." in looked.stdout

    locked = kpt_plugged("lock", "-o", tables / "kpt.lock", "--dtype", "float32", "--json", plugins=plugins)
    (of_plugin,) = [each for each in json.loads(locked.stdout)["entries"] if each["op"] == "tuned.product"]
    assert (of_plugin["kernel"], of_plugin["config"], of_plugin["version"]) == (f"{PRODUCT}:quick", {"times": 1}, "1.0")
    same = kpt_plugged("doctor", "--lock", tables / "kpt.lock", plugins=plugins)
    assert (same.exit_code, same.stdout) == (0, f"All is as in {tables / 'kpt.lock'}.\n")

    metadata = plugins / "tuned_plugin-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    other = kpt_plugged("doctor", "--lock", tables / "kpt.lock", plugins=plugins)
    assert other.exit_code == 1
    first, second, verdict = other.stdout.splitlines()
    assert first == f"kernel {PRODUCT}:quick of tuned-plugin 1.0 was locked for tuned.product, 1.1 is installed"
    assert f"{PRODUCT}:quick was locked, {PRODUCT}:slow would run now" in second
    assert verdict == f"2 differences from {tables / 'kpt.lock'}."
    assert "was measured as of tuned-plugin 1.0, and comes from tuned-plugin 1.1 now" in other.stderr


def test_json_is_the_whole_document(kpt_plugged, plugins, tables):
    options = ("--case", "one row", "--seconds", "0.1", "--dry-run", "--json")
    done = kpt_plugged("tune", "tuned.product", *options, plugins=plugins)
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    (entry,) = document["entries"]
    assert (entry["op"], entry["key"], entry["case"]) == ("tuned.product", [1], "one row")
    (result,) = document["results"]
    left_out = [each["kernel"].rpartition("/")[2] for each in result["left_out"]]
    assert left_out == ["tuned_plugin:choosy", "tuned_plugin:wrong"]
    assert document["path"] is None
    assert not tables.exists()


def test_without_kernels_nothing_is_tuned_and_nothing_written(kpt, tables, monkeypatch, tmp_path):
    for arguments in ((), ("--output", tmp_path / "table.json")):
        result = kpt("tune", "moe.top_k_gating", *arguments)
        assert result.exit_code == 0, result.output
        assert "moe.top_k_gating, float32, bfloat16, float16: only the reference takes" in result.stdout
        assert result.stdout.endswith(
            "Nothing is to be tuned: no kernel but the reference takes the cases. Nothing was written.\n"
        )
    assert not tables.exists()
    assert not (tmp_path / "table.json").exists()


def test_what_is_not_even_tried_is_said_to_be_so(kpt_plugged, plugins, tables):
    done = kpt_plugged("tune", "tuned.product", "--training", plugins=plugins)
    assert done.exit_code == 0, done.stderr
    assert "tuned.product: its cases name no argument with a gradient" in done.stdout
    assert done.stdout.endswith("Nothing was measured, and nothing was written.\n")
    assert not tables.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["moe.expert"], "unknown op 'moe.expert': did you mean 'moe.experts'"),
        (["--case", "mixtral"], "unknown case 'mixtral': did you mean 'mixtral-8x7b'"),
        (["--dtype", "bflot16"], "unknown dtype 'bflot16': did you mean bfloat16"),
        (["--device", "quantum"], "unknown device 'quantum'"),
        (["--seconds", "0"], "--seconds 0: expected more than 0"),
        (["--output", "no/such/folder/table.json"], "no/such/folder does not exist; make it first"),
    ],
)
def test_wrong_arguments_end_as_a_sentence(kpt, arguments, said):
    result = kpt("tune", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_a_choice_in_the_environment_is_refused(kpt, monkeypatch):
    monkeypatch.setenv("KPT_USE", "reference")
    result = kpt("tune")
    assert result.exit_code == 2
    assert "reference was asked for (use or KPT_USE): tuning compares kernels, take that back" in result.stderr


def test_a_table_that_could_not_be_used_is_kept_and_told(kpt_plugged, plugins, tables):
    first = kpt_plugged("tune", "tuned.product", "--seconds", "0.1", "--json", plugins=plugins)
    table = Path(json.loads(first.stdout)["path"])
    table.write_text("{")
    done = kpt_plugged("tune", "tuned.product", "--seconds", "0.1", plugins=plugins)
    assert done.exit_code == 0, done.stderr
    assert f"it is kept as {table}.corrupt" in " ".join(done.stdout.split())
    assert f"kpt: warning: tuning table {table}: ignored, because it is not whole JSON" in " ".join(done.stderr.split())
    assert (tables / f"{table.name}.corrupt").read_text() == "{"
