import pytest
import torch

from kpt_cli.demo.model import new_model
from kpt_cli.demo.sizes import QUICK
from kpt_cli.demo.training import train


def losses(seed: int, **options) -> list[float]:
    tokens = torch.arange(20_000) * 7 % 61  # a pattern that is quickly learnt
    model = new_model(QUICK, seed)
    given = {"steps": 8, "seconds": None, "on_step": lambda log, done: None} | options
    return train(model, tokens, tokens, QUICK, seed=seed, **given).losses


def test_same_seed_gives_the_same_losses_bit_by_bit():
    assert losses(3) == losses(3)


def test_another_seed_gives_other_losses():
    assert losses(3) != losses(4)


def test_loss_falls():
    found = losses(0, steps=40)
    assert found[0] == pytest.approx(torch.tensor(QUICK.vocabulary).log().item(), rel=0.05)
    assert found[-1] < 0.75 * found[0]


def test_training_by_time_ends():
    done = []
    losses(0, steps=None, seconds=0.2, on_step=lambda log, share: done.append(share))
    assert done[-1] == 1
    assert done == sorted(done)


def test_experts_stay_balanced():
    logs = []
    losses(0, steps=40, on_step=lambda log, done: logs.append(log))
    # The number of experts per token is a perfect balance, the number of experts the worst.
    assert logs[-1].balance[-1] < 1.3 * QUICK.experts_per_token


def test_held_out_loss_is_measured_from_beginning_to_end():
    logs = []
    losses(0, on_step=lambda log, done: logs.append(log))
    steps = [step for step, _ in logs[-1].held_out]
    assert steps[0] == 0
    assert steps[-1] == 8
    assert steps == sorted(set(steps))
