"""`kpt optimize` on a model of dense layers: plan written, applied, taken back."""

import json

import pytest
import torch

import kpt_optimize
from kpt_fp8 import NativeFP8Linear
from test_rewrites import installed

__all__ = ["installed"]
pytest.importorskip("kpt_cli", reason="the command is kpt-cli's")
transformers = pytest.importorskip("transformers", reason="the model is one of transformers")
pytestmark = pytest.mark.slow


@pytest.fixture
def llama(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def optimize(llama, plan, *options):
    from typer.testing import CliRunner

    from kpt_cli.main import app

    arguments = ["optimize", llama, "-o", plan, "--tokens", 16, "--objective", "memory", "--json", *options]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="kpt")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_memory_is_saved_where_the_budget_allows_and_given_back(llama, tmp_path, installed):
    told = optimize(llama, tmp_path / "plan.json", "--level", "aggressive")["plan"]
    kept = {entry["module"] for entry in told["entries"] if entry["kept"]}
    assert kept >= {"model.layers.0.mlp.down_proj", "lm_head"}
    assert told["error"] <= told["max_error"]
    assert told["bytes_after"] < 0.5 * told["bytes_before"]
    balanced = optimize(llama, tmp_path / "balanced.json")["plan"]
    assert balanced["error"] <= balanced["max_error"] == 0.05
    assert {entry["module"] for entry in balanced["entries"] if entry["kept"]} <= kept
    assert balanced["bytes_after"] < 0.5 * balanced["bytes_before"]

    model = transformers.LlamaForCausalLM.from_pretrained(llama).eval()
    ids = torch.arange(16)[None]
    with torch.no_grad():
        before = model(ids).logits
        applied = kpt_optimize.apply_plan(model, tmp_path / "plan.json", inplace=True)
        converted = {name for name, each in model.named_modules() if isinstance(each, NativeFP8Linear)}
        assert converted == kept
        after = model(ids).logits
        assert 0 < (after - before).abs().max() <= told["max_error"] * before.abs().max()
        applied.revert()
        assert torch.equal(model(ids).logits, before)


def test_the_report_says_which_budgets_keep_more(llama, tmp_path, installed):
    told = optimize(llama, tmp_path / "plan.json", "--max-error", 0.02)["plan"]
    assert all(entry["error"] > 0 for entry in told["entries"])  # what each costs, though little is kept
    *_, budget = told["budgets"]
    assert budget["modules"] == budget["total"] == len({entry["module"] for entry in told["entries"]})
    larger = optimize(llama, tmp_path / "larger.json", "--max-error", budget["max_error"] * 1.001)["plan"]
    assert len({entry["module"] for entry in larger["entries"] if entry["kept"]}) == budget["modules"]
