import json
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from markupsafe import escape

import kpt_optimize
from kpt_cli.demo import KIND, QUICK, report, run
from kpt_cli.demo.measure import TRAINING, of_times

#: Elements that have no end.
VOID = {"meta", "br", "hr", "img", "link", "input", "source", "wbr"}


class Page(HTMLParser):
    """Fails where elements don't nest, and notes what the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "srcset", "data", "action"):
                self.references.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop() == tag


@pytest.fixture(scope="session")
def page(quick_run) -> str:
    return (quick_run.folder / "report.html").read_text(encoding="utf-8")


def test_all_files_are_there_and_nothing_else(quick_run):
    names = {path.name for path in quick_run.folder.iterdir()}
    assert names == {"model", "plan.json", "report.json", "report.html", "loss.png"}
    assert [path.name for path in quick_run.folder.parent.iterdir()] == ["out"]


def test_html_is_well_formed_and_needs_nothing_else(page):
    parsed = Page()
    parsed.feed(page)
    parsed.close()
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert all(reference.startswith("#") for reference in parsed.references)
    assert all(reference.removeprefix("#") in parsed.ids for reference in parsed.references)
    assert not [foreign for foreign in ("://", "@import", "<script") if foreign in page]


def test_html_follows_light_and_dark(page):
    assert "prefers-color-scheme: dark" in page
    assert "#010101" not in page
    assert page.count("<svg") == 7  # the loss, wide and narrow, and a panel for each comparison


def test_json_says_all(quick_run):
    document = json.loads((quick_run.folder / "report.json").read_text(encoding="utf-8"))
    assert document["kind"] == KIND
    parts = (
        "kind format settings machine corpus model training quality comparisons over_plain memory plan kernels samples "
        "features missing next first headline"
    )
    assert set(document) == {*parts.split(), "durations"}
    assert len(document["training"]["losses"]) == QUICK.steps
    assert document["training"]["losses"][-1] < document["training"]["losses"][0]
    names = [comparison["name"] for comparison in document["comparisons"]]
    assert names == ["prefill", "decode", "peak memory, prefill", "peak memory, decode", TRAINING]
    assert [comparison["name"] for comparison in document["over_plain"]] == ["prefill", "decode"]
    for row in document["quality"]["expert_load"]:
        assert sum(row) == pytest.approx(1)


def test_the_gain_comes_first_on_the_page_and_on_the_terminal(page, quick_run):
    headline = quick_run.result["headline"]
    assert [f"{c['name']} {c['verdict']}" in headline for c in quick_run.result["comparisons"][:2]] == [True, True]
    assert page.index(f"<h1>{escape(headline)}</h1>") < page.index("class=")
    stderr = quick_run.printed.stderr
    first = quick_run.result["first"]
    assert all(f"{c['name']} {c['verdict']}" in stderr for c in first)
    assert stderr.index("Timing the untrained model") < stderr.index("Training a tokenizer")


def test_each_feature_shows_gain_interval_and_quality(page, quick_run, kpt, tmp_path, monkeypatch):
    features = quick_run.result["features"]
    assert [feature["name"] for feature in features] == ["Mixture-of-Experts", "FP8", "attention"]
    assert quick_run.result["missing"] == []
    section = page[page.index("<h2>Each feature by itself") : page.index("<h2>Training")]
    monkeypatch.setattr(run, "run_demo", lambda settings, folder, screen: quick_run.result)
    monkeypatch.setenv("COLUMNS", "300")
    shown = " ".join(kpt("demo", "--quick", "-o", tmp_path / "out").stdout.split())
    for feature in features:
        assert feature["name"] in section
        assert escape(feature["code"]) in section
        for comparison in feature["comparisons"]:
            assert comparison["before"]["runs"] >= QUICK.rounds
            assert comparison["gain_low"] <= comparison["gain"] <= comparison["gain_high"]
            assert comparison["verdict"] in section
            assert comparison["interval"] in section
            assert f"{comparison['verdict']}, {comparison['interval']}" in shown
        reads = feature["perplexity"]
        assert f"{reads['before']:.2f} → {reads['after']:.2f}" in section
        assert 0.9 < reads["after"] / reads["before"] < 1.1
    assert features[1]["bytes"]["after"] < features[1]["bytes"]["before"] / 2


def test_a_loss_is_as_visible_as_a_gain(quick_run):
    slower = of_times("prefill", 64, [1.0] * 15, [1.25] * 15)
    found = {**quick_run.result, "comparisons": [slower], "features": [], "next": run.next_step(Path("out"))}
    shown = report.page(found)
    assert shown.count('class="value bad"') >= 1
    assert '<span class="tag bad">1.25x slower</span>' in shown
    assert '<span class="bad">1.25x slower</span>' in shown


def test_the_last_step_works_as_it_is_shown(page, quick_run, kpt, tmp_path, monkeypatch):
    step = json.loads((quick_run.folder / "report.json").read_text(encoding="utf-8"))["next"]
    assert escape(step["command"]) in page
    assert escape(step["program"]) in page
    assert page.index("Now your model") > page.index("How it was measured")
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(step["command"])
    assert Path(program).name == "kpt"
    done = kpt(*arguments, "--tokens", "32")
    assert done.exit_code == 0, done.output
    names = {}
    exec(step["program"], names)
    kept = kpt_optimize.Plan.load("my-plan.json").kept
    assert names["model"](torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    assert (names["model"].model.layers[0].mlp.experts.config._experts_implementation == "kpt") == any(
        (entry.module, entry.rewrite) == ("model.layers.0.mlp.experts", "moe.experts") for entry in kept
    )


def test_stdout_is_the_same_json(quick_run):
    printed = json.loads(quick_run.printed.stdout)
    written = json.loads((quick_run.folder / "report.json").read_text(encoding="utf-8"))
    del printed["durations"], written["durations"]
    assert printed == written


def test_progress_is_told_on_stderr(quick_run):
    assert "Training a tokenizer" in quick_run.printed.stderr
    assert "held-out" in quick_run.printed.stderr


def test_model_and_tokenizer_load_and_write(quick_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(quick_run.folder / "model")
    assert "kpt" not in (quick_run.folder / "model" / "config.json").read_text()
    assert "kpt" not in model.get_experts_implementation().values()
    tokenizer = AutoTokenizer.from_pretrained(quick_run.folder / "model")
    inputs = tokenizer("def ", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        output = model.generate(inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert output.shape[1] == inputs.shape[1] + 4
    assert tokenizer.decode(output[0]).startswith("def ")


def test_plan_loads_and_applies(quick_run):
    from transformers import AutoModelForCausalLM

    plan = kpt_optimize.Plan.load(quick_run.folder / "plan.json")
    assert plan == quick_run.result["plan"]
    assert plan.entries
    model = AutoModelForCausalLM.from_pretrained(quick_run.folder / "model")
    kpt_optimize.apply_plan(model, plan)


def test_tables_for_people_and_an_earlier_demo_is_replaced(kpt, quick_run, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_demo", lambda settings, folder, screen: quick_run.result)
    out = tmp_path / "out"
    for _ in range(2):
        done = kpt("demo", "--quick", "-o", out)
        assert done.exit_code == 0, done.output
    for part in (
        "Before and after",
        "Plan: ",
        "Which kernel ran where",
        "perplexity, held-out",
        "What the model writes",
    ):
        assert part in done.stdout
    assert str(out / "report.html") in done.stdout.replace("\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_every_comparison_shows_its_gain_and_interval(page, quick_run, kpt, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_demo", lambda settings, folder, screen: quick_run.result)
    monkeypatch.setenv("COLUMNS", "300")
    shown = " ".join(kpt("demo", "--quick", "-o", tmp_path / "out").stdout.split())
    tiles = page[page.index('class="tiles"') : page.index("<section>")]
    for comparison in quick_run.result["comparisons"]:
        assert f"{comparison['verdict']}, {comparison['interval']}" in shown
        assert page.count(comparison["interval"]) >= 2  # chart and table
        if comparison["name"] in ("prefill", "decode", TRAINING):
            assert comparison["interval"] in tiles
