"""`FP8TrainingEngine`: steps, guard rails, escalation, and going on from a checkpoint."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kpt_core import InputError, UnknownNameError
from kpt_fp8.training import DivergedError, FP8Recipe, FP8TrainingEngine, FP8TrainingLinear, Guards
from kpt_fp8.training.quantizing import GRADIENT, INPUT

RECIPES = ["tensor", "delayed", "row", "block"]


class Language(nn.Module):
    """A language model of two blocks with dropout; logits have the shape `[batch, length, vocabulary]`."""

    def __init__(self, replays=False):
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.lm_head = nn.Linear(64, 96)
        self.replays = replays

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.replays else block(x)
        return self.lm_head(x)


def tokens(step):
    return torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(step))


def made(recipe="tensor", seed=0, lr=1e-3, replays=False, **options):
    torch.manual_seed(seed)
    model = Language(replays)
    return FP8TrainingEngine(model, torch.optim.AdamW(model.parameters(), lr=lr), recipe=recipe, **options)


def loss_of(engine, step):
    batch = tokens(step)
    return F.cross_entropy(engine(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def steps(engine, first, last):
    return [engine.step(loss_of(engine, step)) for step in range(first, last)]


def perceptron(recipe="tensor", guards=None, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    made = optimizer(model.parameters(), lr=0.01)
    return FP8TrainingEngine(model, made, recipe=recipe, guards=guards, **options)


def all_bits(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype is b[name].dtype
            assert torch.equal(value.reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)), name
        elif isinstance(value, dict):
            all_bits(value, b[name])
        else:
            assert value == b[name], name


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_falls_as_it_does_in_full_precision(recipe):
    engine, plain = made(recipe, lr=3e-3), made("none", lr=3e-3)
    last = []
    for each in (engine, plain):
        torch.manual_seed(1)
        for step in range(24):
            loss = loss_of(each, step % 2)
            assert each.step(loss).outcome == "taken"
        last.append(loss.item())
    assert last[1] < 2.5
    assert last[0] == pytest.approx(last[1], rel=0.1)
    assert last[0] != last[1]
    assert list(engine.layers) == [f"blocks.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    assert engine.left["lm_head"] == "excluded by 'lm_head'"


@pytest.mark.parametrize(("recipe", "replays"), [*((recipe, False) for recipe in RECIPES), ("delayed", True)])
def test_going_on_from_a_checkpoint_is_equal_in_all_bits(recipe, replays, tmp_path):
    guards = Guards(check_every=4, most_error=0.03, patience=2, growth_interval=3)
    options = {"guards": guards, "clip_norm": 1.0, "replays": replays}
    straight = made(recipe, **options)
    wholly = steps(straight, 0, 20)
    first = made(recipe, **options)
    before = steps(first, 0, 10)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    other = made(recipe, seed=7, **options)
    torch.manual_seed(99)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))  # weights_only
    assert wholly == before + steps(other, 10, 20)
    # The gradient's error is above 3 %, so layers did escalate, before and after the checkpoint.
    if recipe == "tensor":
        assert {each.step for each in other.report.escalations} == {8, 16}
    all_bits(straight.state_dict(), other.state_dict())
    assert str(straight.report) == str(other.report)


def test_accumulated_batches_are_one_step():
    torch.manual_seed(3)
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    whole, parts = perceptron("row", guards=Guards()), perceptron("row", guards=Guards(), accumulation=4)
    assert whole.step(F.mse_loss(whole(x), y)).outcome == "taken"
    before = copy.deepcopy(parts.model.state_dict())
    for i in range(4):
        outcome = parts.step(F.mse_loss(parts(x[2 * i : 2 * i + 2]), y[2 * i : 2 * i + 2])).outcome
        assert outcome == ("taken" if i == 3 else "accumulated")
        if i < 3:
            all_bits(parts.model.state_dict(), before)
            with pytest.raises(InputError, match=r"between two steps; got \d of 4 batches accumulated"):
                parts.state_dict()
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert parts.steps == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_planted_overflow_is_found_skipped_and_recovered_from(recipe):
    engine = perceptron(recipe, Guards(loss_scale=1024, growth_interval=2), torch.optim.AdamW)
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    for _ in range(3):
        assert engine.step(F.mse_loss(engine(x), y)).outcome == "taken"
    before = copy.deepcopy(engine.state_dict())
    bad = x.clone()
    bad[3, 5] = float("inf")
    report = engine.step(F.mse_loss(engine(bad), y))
    assert (report.outcome, report.loss_scale) == ("skipped", 1024 if recipe == "delayed" else 512)
    # Under a delayed scale the infinity saturates, which is what is seen then.
    found = "% of the input of '0' saturated" if recipe == "delayed" else "the input of '0' is not finite"
    assert found in report.reason
    after = engine.state_dict()
    all_bits(before["optimizer"], after["optimizer"])
    for name, value in before["model"].items():
        if name.endswith(("weight", "bias")):
            assert torch.equal(value, after["model"][name])
    assert all(each.grad is None for each in engine.model.parameters())
    losses = []
    for _ in range(6):
        loss = F.mse_loss(engine(x), y)
        losses.append(loss.item())
        assert engine.step(loss).outcome == "taken"
    assert losses == sorted(losses, reverse=True)
    assert engine.loss_scale == 1024
    report = engine.report
    assert (report.steps, report.skipped) == (10, 1)
    assert "step 4 skipped: " in str(report)


def test_a_jump_that_also_overflows_is_gone_on_from_alike():
    engine, batch = perceptron("delayed"), torch.randn(8, 64)
    for _ in range(3):
        engine.step(engine(batch).square().mean())
    report = engine.step(engine(batch * 100).square().mean() * 1e38)
    assert "saturated" in report.reason
    assert "is not finite" in report.reason
    other = perceptron("delayed")
    other.load_state_dict(copy.deepcopy(engine.state_dict()))
    for each in (engine, other):
        assert each.step(each(batch * 100).square().mean()).outcome == "taken"
    assert all(map(torch.equal, engine.model.parameters(), other.model.parameters()))


def test_a_jump_that_saturates_is_skipped_and_scaled_by_what_is_there():
    engine = perceptron(FP8Recipe(delayed=True, history=4), Guards(patience=2, check_every=1000))
    x, y = torch.rand(8, 64), torch.randn(8, 64)
    for _ in range(3):
        engine.step(F.mse_loss(engine(x), y))
    first, scale = engine.layers["0"], engine.loss_scale
    weights = copy.deepcopy(engine.model.state_dict())
    report = engine.step(F.mse_loss(engine(10 * x), y))
    assert report.outcome == "skipped"
    assert "% of the input of '0' saturated" in report.reason
    assert report.loss_scale == scale  # nothing was infinite
    assert first.delayed_ready == (False, False, False)
    assert torch.equal(first.weight, weights["0.weight"])
    assert engine.step(F.mse_loss(engine(10 * x), y)).outcome == "taken"
    torch.testing.assert_close(first.amax_history[INPUT, 0], 10 * x.max())
    assert first.delayed_ready == (True, True, True)
    # The second such sign, with no good measurement in between.
    report = engine.step(F.mse_loss(engine(100 * x), y))
    assert [(each.layer, each.before, each.after) for each in report.escalations] == [
        (name, "delayed", "row") for name in engine.layers
    ]
    assert "its input saturates again and again" in str(engine.report)
    assert engine.step(F.mse_loss(engine(100 * x), y)).outcome == "taken"


def test_an_overflow_of_float16_gradients_lowers_the_scale_until_they_fit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).half()
    engine = FP8TrainingEngine(model, torch.optim.SGD(model.parameters(), lr=1e-4), recipe="delayed")
    outcomes = []
    for _ in range(8):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).half()
        outcomes.append(engine.step(engine(x).float().square().sum()).outcome)
    skipped = outcomes.index("taken")
    assert skipped > 0
    assert outcomes == ["skipped"] * skipped + ["taken"] * (8 - skipped)
    assert engine.loss_scale == 65536 / 2**skipped
    assert all(each.isfinite().all() for each in model.parameters())


def test_delayed_gradients_follow_the_loss_scale():
    engine = perceptron("delayed", Guards(loss_scale=256, growth_interval=100))
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    engine.step(F.mse_loss(engine(x), y))
    layer = engine.layers["0"]
    before = layer.scales.clone()
    bad = y.clone()
    bad[0, 0] = float("nan")
    assert engine.step(F.mse_loss(engine(x), bad)).outcome == "skipped"
    assert torch.equal(layer.scales[GRADIENT] * 2, before[GRADIENT])
    assert torch.equal(layer.scales[:GRADIENT], before[:GRADIENT])
    assert engine.step(F.mse_loss(engine(x), y)).outcome == "taken"


def test_a_layer_climbs_the_ladder_while_its_error_stays_high():
    """Rows of very different size: one scale for all loses most of them; a scale for each row does not."""
    engine = perceptron("tensor", Guards(check_every=2, patience=2))
    x = torch.randn(8, 64) * torch.logspace(-8, 0, 8).unsqueeze(1)
    y = torch.randn(8, 64)
    reports = [engine.step(F.mse_loss(engine(x), y)) for _ in range(8)]
    found = [each for report in reports for each in report.escalations]
    assert [(each.step, each.layer, each.before, each.after) for each in found] == [(4, "0", "tensor", "row")]
    assert "the error of its input stays above 10.0 %, now" in str(found[0])
    assert engine.layers["0"].recipe.granularity == "row"
    assert engine.layers["2"].recipe.granularity == "tensor"
    worst = engine.report.layers[0]
    assert max(worst.errors) < 0.1
    # With a limit that no 8-bit number keeps, both end where nothing is quantised, and nothing more is measured.
    engine = perceptron("tensor", Guards(check_every=1, patience=1, most_error=0.001))
    for _ in range(5):
        engine.step(F.mse_loss(engine(x), y))
    climbed = [(each.before, each.after) for each in engine.report.escalations if each.layer == "2"]
    assert climbed == [("tensor", "row"), ("row", "block"), ("block", "none")]
    torch.testing.assert_close(engine(x), nn.Sequential.forward(engine.model, x))
    assert torch.equal(engine.layers["0"](x), F.linear(x, engine.layers["0"].weight, engine.layers["0"].bias))


def test_errors_that_pass_are_forgiven():
    engine = perceptron("tensor", Guards(check_every=1, patience=2))
    good, bad = torch.randn(8, 64), torch.randn(8, 64) * torch.logspace(-8, 0, 8).unsqueeze(1)
    y = torch.randn(8, 64)
    for x in (bad, good, bad, good):
        assert engine.step(F.mse_loss(engine(x), y)).escalations == ()
    assert engine.step(F.mse_loss(engine(bad), y)).escalations == ()
    assert len(engine.step(F.mse_loss(engine(bad), y)).escalations) == 1


def test_clipping_is_of_unscaled_gradients():
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    moved = {}
    for scale in (1.0, 4096.0):
        engine = perceptron("tensor", Guards(loss_scale=scale), clip_norm=0.01)
        before = [each.detach().clone() for each in engine.model.parameters()]
        engine.step(F.mse_loss(engine(x), y))
        change = torch.cat([(a - b).flatten() for a, b in zip(before, engine.model.parameters(), strict=True)])
        moved[scale] = change.norm().item()
    assert moved[1.0] == pytest.approx(0.01 * 0.01, rel=1e-2)
    assert moved[1.0] == pytest.approx(moved[4096.0], rel=1e-3)


def test_training_that_can_not_go_on_stops_with_a_sentence():
    engine = perceptron(guards=Guards(most_skipped=3))
    x = torch.full((4, 64), float("nan"))
    outcomes = [engine.step(engine(x).sum()).outcome for _ in range(2)]
    assert outcomes == ["skipped", "skipped"]
    with pytest.raises(DivergedError, match="3 steps in a row were skipped, the last one because the input of '0'"):
        engine.step(engine(x).sum())


def test_a_model_that_was_converted_before():
    torch.manual_seed(0)
    model = nn.Sequential(FP8TrainingLinear(64, 64, recipe="row"), nn.Linear(64, 64))
    engine = FP8TrainingEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(engine.layers) == ["0"]
    assert engine.layers["0"].recipe.granularity == "row"


def test_wrong_input():
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"optimizer must be a torch\.optim\.Optimizer; got float"):
        FP8TrainingEngine(model, 0.1)
    with pytest.raises(InputError, match=r"model must be an nn\.Module; got NoneType"):
        FP8TrainingEngine(None, optimizer)
    with pytest.raises(InputError, match="accumulation must be a positive integer; got 0"):
        FP8TrainingEngine(model, optimizer, accumulation=0)
    with pytest.raises(InputError, match="clip_norm must be positive; got 0"):
        FP8TrainingEngine(model, optimizer, clip_norm=0)
    with pytest.raises(UnknownNameError, match="unknown FP8 recipe 'dynamic'"):
        FP8TrainingEngine(model, optimizer, recipe="dynamic")
    with pytest.raises(InputError, match="most_error must be positive; got 0"):
        Guards(most_error=0)
    assert type(model[0]) is nn.Linear
    engine = FP8TrainingEngine(model, optimizer)
    with pytest.raises(InputError, match=r"loss must be one number.*got \[4, 64\]"):
        engine.step(engine(torch.randn(4, 64)))
    with pytest.raises(InputError, match=r"got \[\], requires_grad=False"):
        engine.step(torch.tensor(1.0))
    other = nn.Linear(2, 2)
    stranger = FP8TrainingEngine(
        nn.Sequential(nn.Linear(64, 64)), torch.optim.SGD(other.parameters(), lr=0.1), recipe="row"
    )
    with pytest.raises(InputError, match="no parameter of the optimizer has a gradient"):
        stranger.step(stranger(torch.randn(4, 64)).sum())


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 256, 128))


def test_matrices_that_are_not_trained_in_8_bits_are_named():
    model = nn.ModuleDict({"linear": nn.Linear(64, 64), "lm_head": nn.Linear(64, 64), "experts": Stacked()})
    model["conv"] = nn.Conv1d(64, 64, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    left = FP8TrainingEngine(model, optimizer).left
    assert left["experts"] == "it is a Stacked with stacked matrices, no experts as transformers fuses them"
    assert left.keys() == {"lm_head", "experts"}
    assert FP8TrainingEngine(model, optimizer).left.keys() == left.keys()  # converted before


def test_a_checkpoint_that_does_not_fit_changes_nothing():
    engine = perceptron("tensor")
    before = copy.deepcopy(engine.state_dict())
    with pytest.raises(InputError, match="histories of 16 steps for '0', this engine 0: make it with the same recipe"):
        engine.load_state_dict(perceptron("delayed").state_dict())
    with pytest.raises(InputError, match="the state is of 1 FP8 layers, this model has 2, and '2' is in one of them"):
        engine.load_state_dict(perceptron("tensor", exclude="2").state_dict())
    with pytest.raises(InputError, match="state must be what state_dict gave"):
        engine.load_state_dict(engine.model.state_dict())
    wrong = copy.deepcopy(before)
    wrong["engine"]["version"] = 9
    with pytest.raises(InputError, match="the state has version 9; this kpt-fp8 reads 2"):
        engine.load_state_dict(wrong)
    all_bits(before, engine.state_dict())
