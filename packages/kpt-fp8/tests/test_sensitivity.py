import io
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kpt_core import InputError, UnknownNameError
from kpt_fp8 import NativeFP8Linear
from kpt_fp8.quality import sqnr
from kpt_fp8.sensitivity import measure_sensitivity


class Model(nn.Module):
    """Two layers, of which the second counts for ten times as much; a third that is never called."""

    def __init__(self):
        super().__init__()
        self.light, self.heavy, self.idle = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, labels=None):
        logits = self.dropout(self.light(x) + 10 * self.heavy(input=x))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def batches(labels=False):
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in (5, 7):
        batch = {"x": torch.randn(size, 64, generator=generator)}
        found.append(batch | ({"labels": torch.randint(64, (size,), generator=generator)} if labels else {}))
    return found


def test_each_layer_by_itself(model):
    model.heavy.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    done = []
    report = measure_sensitivity(
        model, batches(labels=True), granularities=["row", "128x128"], progress=lambda *what: done.append(what)
    )
    assert [layer.name for layer in report.layers] == ["heavy", "heavy", "light", "light"]
    assert report.skipped == {"idle": "the data do not reach it"}
    assert done[0][:2] == (0, 12)
    assert done[-1] == (12, 12, "done")
    for layer in report.layers:
        assert (layer.bytes_before, layer.shape) == (4 * (64 * 64 + 64), (64, 64))
        assert layer.bytes_after == 64 * 64 + 4 * 64 + (4 * 64 if layer.granularity == "row" else 4)

    # By hand, with the layer in its place.
    x = torch.cat([batch["x"] for batch in batches(labels=True)])
    layer = next(each for each in report.layers if each.name == "light" and each.granularity == "row")
    model.eval()
    with torch.no_grad():
        before, exact = model(x).logits, model.light(x)
        losses = [model(**batch).loss for batch in batches(labels=True)]
        kept, model.light = model.light, NativeFP8Linear.from_linear(model.light)
        error = ((model(x).logits - before).norm(dim=1) / before.norm(dim=1)).max()
        changed = [model(**batch).loss for batch in batches(labels=True)]
        wanted = sqnr(exact, model.light(x))
        model.light = kept
    assert layer.error == pytest.approx(float(error), rel=1e-4)
    assert layer.output.sqnr == pytest.approx(wanted.sqnr, abs=1e-3)
    assert layer.output.worst_row_sqnr == pytest.approx(wanted.worst_row_sqnr, abs=1e-3)
    assert report.loss == pytest.approx(float(sum(losses) / 2), rel=1e-5)
    assert layer.loss_change == pytest.approx(float((sum(changed) - sum(losses)) / 2), abs=1e-6)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_model_is_left_as_it_was(model):
    model.heavy.eval()
    flags = [module.training for module in model.modules()]
    measure_sensitivity(model, batches(), max_batches=1)
    assert [module.training for module in model.modules()] == flags
    assert not any(module._forward_hooks for module in model.modules())

    class Broken(Exception):
        pass

    def stop(done, total, what):
        if done:
            raise Broken

    with pytest.raises(Broken):
        measure_sensitivity(model, batches(), progress=stop)
    assert [module.training for module in model.modules()] == flags
    assert not any(module._forward_hooks for module in model.modules())


def test_a_loss_of_ones_own(model):
    report = measure_sensitivity(model, batches(), loss=lambda output, batch: output.logits.square().mean())
    assert report.loss is not None
    changes = {layer.name: layer.loss_change for layer in report.layers}
    assert abs(changes["heavy"]) > abs(changes["light"]) > 0
    assert "perplexity" in str(report)
    assert "perplexity" not in str(measure_sensitivity(model, batches()))


class Masked(nn.Module):
    """Scores, of which the first ones are masked."""

    def __init__(self, masked, value=-math.inf):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.masked, self.value = nn.Linear(64, 64), masked, value

    def forward(self, x):
        mask = torch.arange(64) < self.masked
        return self.linear(x).masked_fill(mask, self.value)


def test_masked_scores_count_for_nothing_and_all_others_do():
    data = [torch.randn(3, 64, generator=torch.Generator().manual_seed(0))]
    part = Masked(32)
    error = measure_sensitivity(part, data).layers[0].error
    with torch.no_grad():
        exact, after = (layer(data[0])[:, 32:] for layer in (part.linear, NativeFP8Linear.from_linear(part.linear)))
    assert error == pytest.approx(float(((after - exact).norm(dim=1) / exact.norm(dim=1)).max()), rel=1e-3)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_output_without_a_finite_number_tells_nothing(value):
    with pytest.raises(InputError, match="must hold finite numbers to compare; got none among 192: check the data"):
        measure_sensitivity(Masked(64, value), [torch.randn(3, 64)])


def test_an_output_whose_shape_depends_on_its_numbers():
    class Large(Masked):
        def forward(self, x):
            scores = self.linear(x)
            return scores[scores.abs() > 0.2]

    with pytest.raises(InputError, match=r"one shape with and without 8-bit layers; got \[\[1, \d+\]\], then"):
        measure_sensitivity(Large(0), [torch.randn(64, 64, generator=torch.Generator().manual_seed(0))])


def test_table_json_and_plot(model, tmp_path):
    from rich.console import Console

    report = measure_sensitivity(model, batches(labels=True))
    lines = str(report).splitlines()
    assert lines[0] == "Sensitivity of layers, worst first"
    assert [line.split()[0] for line in lines[1:]] == ["layer", "heavy", "light"]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report)
    shown = console.export_text()
    assert shown.index("heavy") < shown.index("light")

    report.save(tmp_path / "report.json")
    document = json.loads((tmp_path / "report.json").read_text())
    assert [layer["name"] for layer in document["layers"]] == ["heavy", "light"]
    assert document["layers"][0]["output"]["sqnr"] == report.layers[0].output.sqnr

    for name in ("plot.svg", "plot.png"):
        report.plot(tmp_path / name)
    svg = (tmp_path / "plot.svg").read_text()
    assert "heavy (row)" in svg
    assert "worst row" in svg
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"path must end in \.svg, \.png, \.pdf; got .*plot\.gif"):
        report.plot(tmp_path / "plot.gif")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "plot.svg", "report.json"]


def test_infinity_is_null_in_json(tmp_path):
    model = nn.Linear(64, 64)
    with torch.no_grad():
        model.weight.fill_(0.5)  # exact in 8 bits
    report = measure_sensitivity(nn.Sequential(model), [torch.ones(2, 64)])
    assert math.isinf(report.layers[0].output.sqnr)
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["layers"][0]["output"]["sqnr"] is None
    report.plot(tmp_path / "plot.svg")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": []}, "data gave no batch"),
        ({"data": torch.randn(2, 64)}, "must be a sequence of batches; got one Tensor"),
        ({"data": {"x": torch.randn(2, 64)}}, "must be a sequence of batches; got one dict"),
        ({"granularities": "row"}, "must be names in a list"),
        ({"granularities": []}, "must be names in a list"),
        ({"include": "query"}, r"include has 'query', which describes no nn\.Linear"),
        ({"min_features": 65}, "no layer to convert"),
        ({"model": torch.nn.Identity}, r"model must be an nn\.Module; got type"),
        ({"include": "idle"}, "no layer was called"),
    ],
)
def test_wrong_input_is_a_sentence(model, options, message):
    given = {"model": model, "data": batches()} | options
    with pytest.raises(InputError, match=message):
        measure_sensitivity(given.pop("model"), given.pop("data"), **given)


def test_unknown_granularity_and_an_output_without_numbers(model):
    with pytest.raises(UnknownNameError, match="granularity of a plan"):
        measure_sensitivity(model, batches(), granularities=["1x32"])

    class Silent(Model):
        def forward(self, x):
            super().forward(x)

    with pytest.raises(InputError, match="output has no floating tensor; got NoneType"):
        measure_sensitivity(Silent(), batches())
