"""The command `kpt optimize`, from a folder to a plan."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

import kpt_core
import kpt_optimize
from kpt_cli.options import LEVELS, OBJECTIVES
from kpt_optimize import Optimized, PlanEntry
from kpt_optimize.config import Config
from model_files import listing


class TestRealRun:
    def test_plan_is_whole(self, optimized):
        document = optimized["document"]
        plan = document["plan"]
        assert plan["model"] == "MixtralForCausalLM"
        layers = {entry["module"] for entry in plan["entries"] if entry["rewrite"] != "linear.few_rows"}
        assert layers == {
            f"model.layers.{layer}.{module}" for layer in (0, 1) for module in ("mlp.experts", "self_attn")
        }
        assert {"lm_head", "model.layers.1.self_attn.o_proj"} < {entry["module"] for entry in plan["entries"]} - layers
        assert all(entry["reason"] for entry in plan["entries"])
        assert document["inputs"] == "64 random token ids (the folder has no tokenizer)"

    def test_files_hold_the_same_plan(self, optimized):
        folder, plan = optimized["folder"], optimized["document"]["plan"]
        assert json.loads((folder / "plan.json").read_text()) == plan
        kept = any(entry["kept"] for entry in plan["entries"])
        assert (folder / "out").exists() == kept
        if kept:
            assert json.loads((folder / "out" / "kpt_plan.json").read_text()) == plan

    def test_stderr_is_quiet_without_a_terminal(self, optimized):
        assert optimized["stderr"] == ""

    def test_the_model_runs_with_the_plan_as_the_command_says(self, optimized, mixtral, kpt, quick_optimize, tmp_path):
        from transformers import AutoModelForCausalLM

        result = kpt("optimize", mixtral, "-o", tmp_path / "plan.json")
        told = result.stdout.partition("To run it:\n\n")[2].replace("\n    ", "\n").strip()
        plan = kpt_optimize.Plan.load(tmp_path / "plan.json")
        ids = torch.arange(16)[None]
        with torch.no_grad():
            before = AutoModelForCausalLM.from_pretrained(mixtral)(ids).logits
            names: dict = {}
            exec(told, names)
            with kpt_core.record() as log:
                after = names["model"](ids).logits
        kept = {entry.op for entry in plan.kept}
        assert {selection.op for selection in log} - {"fp8.linear"} == kept - {"fp8.linear"}
        assert (after - before).abs().max() <= 2 * plan.max_error * before.abs().max()


def test_choices_are_those_of_the_core(mixtral):
    for level in LEVELS:
        Config(level=level)
    for objective in OBJECTIVES:
        Config(objective=objective)


def test_options_reach_the_optimisation(kpt, mixtral, quick_optimize):
    options = ["--level", "aggressive", "--objective", "memory", "--max-error", "0.5", "--tokens", "7"]
    result = kpt("optimize", mixtral, *options, "--dtype", "bfloat16", "--device", "cpu")
    assert result.exit_code == 0, result.output
    (call,) = quick_optimize
    assert (call["level"], call["objective"], call["max_error"]) == ("aggressive", "memory", 0.5)
    assert call["example_inputs"]["input_ids"].shape == (1, 7)
    assert {parameter.dtype for parameter in call["model"].parameters()} == {torch.bfloat16}
    assert not call["model"].training


def test_text_shows_the_plan_and_how_to_keep_it(kpt, mixtral, quick_optimize):
    result = kpt("optimize", mixtral)
    assert result.exit_code == 0, result.output
    assert "Plan for MixtralForCausalLM: balanced, latency, on cpu" in result.stdout
    assert "model.layers.0.mlp.experts" in result.stdout
    assert "moe.experts: " in result.stdout
    assert "Nothing was written; `--output FILE` keeps the plan" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 110


@pytest.mark.parametrize("kept", [True, False])
def test_summary(kpt, mixtral, monkeypatch, kept):
    entry = PlanEntry("a.b", "moe.experts", "moe.experts", "pkg.mod:kernel", 2.0, 1e-3, kept, "the reason")
    plan = kpt_optimize.Plan(
        model="M",
        level="balanced",
        objective="latency",
        device="cpu",
        max_error=0.02,
        versions={},
        entries=(entry,),
        seconds_before=3.0,
        seconds_after=0.0015,
        gain=2000.0,
        noise=12.5,
        bytes_before=2**30,
        bytes_after=2**29,
        error=1e-3,
    )
    monkeypatch.setattr(kpt_optimize, "optimize", lambda model, **options: Optimized(model, plan))
    result = kpt("optimize", mixtral)
    assert "pkg.mod:kernel" in result.stdout
    assert "2.00x" in result.stdout
    if kept:
        for said in (
            "kept: the reason",
            "3.00 s",
            "1.50 ms",
            "2000.00x faster (±1.2%)",
            "2.00x smaller",
            "1024.0 MiB",
            "512.0 MiB",
            "1 of 1 rewrites",
        ):
            assert said in result.stdout
    else:
        assert "rolled back: the reason" in result.stdout
        assert "None of 1 rewrites was kept" in result.stdout


def test_a_verdict_tells_a_gain_in_words_and_a_busy_machine_once(kpt, mixtral, monkeypatch):
    reasons = {0.84: "1.19x slower (±2.4%)", 1.5: "with it the model's error was 1e-1, over the budget of 2e-2"}
    entries = tuple(PlanEntry("a", "r", "o", "k", gain, 1e-3, False, reason, 0.01) for gain, reason in reasons.items())
    noisy = replace(entries[0], gain=1.5, noise=0.7, reason="too noisy for a figure (±93%)")
    note = "the machine is busy: measure again"
    entries = *entries, noisy
    plan = kpt_optimize.Plan("M", "balanced", "latency", "cpu", 0.02, {}, entries, 1.0, 1.0, 1, 1, 0.0, note=note)
    monkeypatch.setattr(kpt_optimize, "optimize", lambda model, **options: Optimized(model, plan))
    result = kpt("optimize", mixtral)
    assert result.exit_code == 0, result.output
    told = " ".join(result.stdout.split())
    for said in ("1.19x slower", "budget", "too noisy"):
        assert said in told
    assert "1.50x" in told
    assert told.count("the machine is busy") == 1
    assert told.index("the machine is busy") < told.index("rewrite, op, kernel")
    assert json.loads(kpt("optimize", mixtral, "--json").stdout)["note"] == note


def test_json_alone_is_on_stdout_whatever_libraries_print(kpt, mixtral, optimized, monkeypatch):
    plan = kpt_optimize.Plan.load(optimized["folder"] / "plan.json")

    def optimize(model, **options):
        print("a library prints")
        return Optimized(model, plan)

    monkeypatch.setattr(kpt_optimize, "optimize", optimize)
    result = kpt("optimize", mixtral, "--json")
    assert json.loads(result.stdout)["output"] is None
    assert "a library prints" in result.stderr


def test_infinite_error_is_valid_json(kpt, mixtral, optimized, monkeypatch):
    plan = kpt_optimize.Plan.load(optimized["folder"] / "plan.json")
    plan = replace(plan, entries=(replace(plan.entries[0], error=float("inf")),))
    monkeypatch.setattr(kpt_optimize, "optimize", lambda model, **options: Optimized(model, plan))
    result = kpt("optimize", mixtral, "--json")
    assert "Infinity" not in result.stdout
    assert json.loads(result.stdout)["plan"]["entries"][0]["error"] is None


REFUSED = {
    ("--level", "balancd"): "unknown level 'balancd': did you mean balanced?",
    ("--level", "x"): "known: conservative, balanced, aggressive",
    ("--objective", "latencey"): "unknown objective 'latencey': did you mean latency?",
    ("--dtype", "bf16"): "unknown dtype 'bf16': did you mean bfloat16",
    ("--device", "cud"): "this machine has cpu",
    ("--device", "cuda"): "no cuda is usable here: this machine has cpu",
    ("--device", "cpu:7"): "no cpu:7 is usable here: this machine has cpu",
    ("--max-error", "-1"): "--max-error -1: expected a relative error of 0 or more",
    ("--max-error", "nan"): "--max-error nan",
    ("--tokens", "0"): "--tokens",
    ("--tokens", "129"): "--tokens 129",
    ("--tokens", "many"): "--tokens",
    ("--seed", "-1"): "--seed",
    ("--levle", "balanced"): "--levle",
}


@pytest.mark.parametrize(
    ("option", "said"), REFUSED.items(), ids=lambda value: "=".join(value) if isinstance(value, tuple) else ""
)
def test_wrong_option(kpt, mixtral, tmp_path, option, said):
    result = kpt("optimize", mixtral, "--copy", tmp_path / "out", *option)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stdout == ""
    assert listing(tmp_path) == []


def test_model_with_nothing_to_rewrite(kpt, llama, tmp_path, monkeypatch):
    monkeypatch.setattr("kpt_attention.rewrites._is_attention", lambda module: False)
    monkeypatch.setattr("kpt_optimize.linear_rewrites.FewRows.sites", lambda rewrite, model: iter(()))
    result = kpt("optimize", llama, "--copy", tmp_path / "out", "--tokens", 4)
    assert result.exit_code == 2
    assert "(LlamaForCausalLM) has nothing that the rewrites of " in result.stderr
    assert "kpt-moe" in result.stderr
    assert listing(tmp_path) == []


def test_kpt_use_of_an_unknown_backend(kpt, mixtral, monkeypatch, tmp_path):
    monkeypatch.setenv("KPT_USE", "nvidai")
    result = kpt("optimize", mixtral, "--copy", tmp_path / "out", "--tokens", 4)
    assert result.exit_code == 2
    assert "nvidai" in result.stderr
    assert listing(tmp_path) == []


class TestModelsThatTransformersRefuses:
    @pytest.fixture
    def refused(self, kpt, mixtral, tmp_path):
        def run(change) -> str:
            model = shutil.copytree(mixtral, tmp_path / "mixtral")
            config = json.loads((model / "config.json").read_text())
            change(config)
            (model / "config.json").write_text(json.dumps(config))
            before = listing(tmp_path)
            result = kpt("optimize", model, "--copy", tmp_path / "out", "--tokens", 4)
            assert result.exit_code == 2, result.output
            assert result.stderr.count("\n") == 1
            assert "Traceback" not in result.stderr
            assert str(model) in result.stderr
            assert listing(tmp_path) == before
            return result.stderr

        return run

    def test_unknown_model_type(self, refused):
        assert "names the model type 'mixtrall', which transformers" in refused(
            lambda c: c.update(model_type="mixtrall")
        )

    def test_nearest_model_types_are_offered(self, refused):
        assert "did you mean mixtral" in refused(lambda c: c.update(model_type="mixtrall"))

    def test_own_code_is_never_run(self, refused):
        change = {"model_type": "acme_moe", "auto_map": {"AutoModelForCausalLM": "modeling_acme.AcmeForCausalLM"}}
        assert "brings its own Python code for model type 'acme_moe', which is never run" in refused(
            lambda c: c.update(change)
        )

    def test_weights_lack_a_layer(self, refused):
        said = refused(lambda c: c.update(num_hidden_layers=3))
        assert "lack" in said
        assert "model.layers.2." in said

    def test_weights_of_another_size(self, refused):
        assert "could not be loaded as MixtralForCausalLM" in refused(lambda c: c.update(intermediate_size=48))

    def test_value_of_a_wrong_type(self, refused):
        refused(lambda c: c.update(hidden_size="large"))

    def test_not_a_language_model(self, refused):
        refused(lambda c: c.update(model_type="vit", architectures=["ViTForImageClassification"]))


def test_architecture_that_transformers_lacks_falls_back_to_the_model_type(kpt, mixtral, tmp_path, quick_optimize):
    model = shutil.copytree(mixtral, tmp_path / "mixtral")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["pipeline"]}))
    assert kpt("optimize", model, "--tokens", 4).exit_code == 0
    assert type(quick_optimize[0]["model"]).__name__ == "MixtralForCausalLM"


def test_a_plan_is_not_written_where_the_copy_will_be(kpt, mixtral, tmp_path):
    """It would be lost with the folder that the copy takes the place of."""
    earlier = shutil.copytree(mixtral, tmp_path / "earlier")
    result = kpt("optimize", mixtral, "--copy", earlier, "--force", "--output", earlier / "plan.json", "--tokens", 4)
    assert result.exit_code == 2
    assert "lies in --copy" in result.output
    assert not (earlier / "plan.json").exists()
