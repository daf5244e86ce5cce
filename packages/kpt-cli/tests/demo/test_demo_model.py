import os
import sys
from dataclasses import replace

import pytest
import torch

from kpt_cli.demo import FULL, QUICK, _spin_less
from kpt_cli.demo.corpus import read_corpus, train_tokenizer
from kpt_cli.demo.model import TrainingLog, describe, load_model, new_model, save_model, train
from kpt_cli.errors import CliError


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(read_corpus(limit=150_000).training, 300, 64)


def test_saved_model_is_the_same_with_experts_of_transformers(tmp_path, tokenizer):
    model = new_model(QUICK, 0, experts_implementation="kpt").eval()
    save_model(model, tokenizer, tmp_path)
    loaded = load_model(tmp_path)
    assert "kpt" in model.get_experts_implementation().values()
    assert "kpt" not in loaded.get_experts_implementation().values()
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)


def test_another_librarys_error_for_a_full_disk_is_a_sentence(tmp_path, tokenizer, monkeypatch):
    model = new_model(QUICK, 0)

    def fail(folder):
        raise RuntimeError("No space left on device (os error 28)")

    monkeypatch.setattr(model, "save_pretrained", fail)
    with pytest.raises(CliError, match="No space left on device"):
        save_model(model, tokenizer, tmp_path)


@pytest.mark.parametrize("size", [QUICK, FULL], ids=lambda size: size.name)
def test_active_parameters_are_those_of_the_experts_that_run(size):
    with torch.device("meta"):
        about = describe(new_model(size, 0), size)
    idle = size.experts - size.experts_per_token
    one_expert = 3 * size.hidden_size * size.expert_size
    assert about["parameters"] - about["active_parameters"] == size.layers * idle * one_expert


def test_output_needs_no_more_room_than_is_checked():
    with torch.device("meta"):
        parameters = describe(new_model(FULL, 0), FULL)["parameters"]
    assert 4 * parameters < 0.75 * FULL.disk_bytes


def test_threads_spin_less_unless_it_is_too_late_or_decided(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    _spin_less()
    assert "GOMP_SPINCOUNT" not in os.environ  # torch is imported
    modules = {name: module for name, module in sys.modules.items() if name != "torch"}
    with monkeypatch.context() as patch:
        patch.setattr(sys, "modules", modules)
        patch.setenv("OMP_WAIT_POLICY", "ACTIVE")
        _spin_less()
        assert "GOMP_SPINCOUNT" not in os.environ
        patch.delenv("OMP_WAIT_POLICY")
        _spin_less()
        assert os.environ.pop("GOMP_SPINCOUNT") == "1000"


def trained(seed: int, on_step=lambda log, done: None, **options) -> TrainingLog:
    tokens = torch.arange(20_000) * 7 % 61  # a pattern that is quickly learnt
    settings = replace(QUICK, **{"seed": seed, "steps": 8} | options)
    return train(new_model(settings, seed, experts_implementation="kpt"), tokens, tokens, settings, on_step)


def test_the_seed_decides_the_losses_bit_by_bit():
    log = trained(3)
    assert log.losses == trained(3).losses
    assert log.losses != trained(4).losses
    steps = [step for step, _ in log.held_out]
    assert steps[0] == 0
    assert steps[-1] == 8
    assert steps == sorted(set(steps))


def test_loss_falls_and_experts_stay_balanced():
    log = trained(0, steps=40)
    assert log.losses[0] == pytest.approx(torch.tensor(QUICK.vocabulary).log().item(), rel=0.05)
    assert log.losses[-1] < 0.75 * log.losses[0]
    # The number of experts per token is a perfect balance, the number of experts the worst.
    assert log.balance[-1] < 1.3 * QUICK.experts_per_token


def test_training_by_time_ends():
    done = []
    trained(0, seconds=0.2, on_step=lambda log, share: done.append(share))
    assert done[-1] == 1
    assert done == sorted(done)
