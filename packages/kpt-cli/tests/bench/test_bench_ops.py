"""`kpt bench attention` and `fp8`, and what all benchmarks do with noise: timings are made up."""

import json
from dataclasses import replace

import pytest
import torch

import kpt_optimize
from kpt_cli.bench import attention, contest, fp8, moe

STEADY, NOISY = [1.0] * 5, [1.0, 480.0, 3.0, 900.0, 2.0]


@pytest.mark.parametrize(
    ("ours", "peer", "seconds", "gain"),
    [
        (STEADY, [2.0] * 5, 1.0, 2.0),
        (STEADY, NOISY, 1.0, None),
        (NOISY, [2.0 * each for each in NOISY], None, 2.0),  # the machine was slow in both, by turns
        (NOISY, STEADY, None, None),
    ],
)
def test_no_figure_is_given_where_its_noise_exceeds_a_fifth(ours, peer, seconds, gain) -> None:
    kpt, other = contest.results_of(("kpt", "peer"), (ours, peer))
    assert (kpt.seconds, other.gain) == (seconds, gain)
    assert other.seconds == (None if None in (seconds, gain) else seconds * gain)
    assert (kpt.noise > 0.2, other.noise > 0.2) == (seconds is None, gain is None)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Give the cases small sizes."""

    def shrunk(module, **sizes):
        tables = module.case_tables()
        cases = tuple(
            replace(case, sizes={**case.sizes, **sizes}) if case.model else case for case in tables[module.TABLE].cases
        )
        table = replace(tables[module.TABLE], cases=cases)
        monkeypatch.setattr(module, "case_tables", lambda: {module.TABLE: table})

    shrunk(attention, kv_heads=1, groups=2, head_dim=8, value_dim=8)
    shrunk(fp8, inner=32, columns=16)
    monkeypatch.setattr(fp8, "_FROM_MEMORY", 2**10)
    monkeypatch.setattr(moe, "QUICK_SHAPES", (moe.Shape("prefill", 64, 16, 32, 4, 2, gated=False),))


COMMANDS = {
    "attention": (3, {"SDPA"}),
    "attention --train": (2, {"SDPA"}),
    "fp8": (3, {"linear", "without oneDNN", "_scaled_mm"}),
    "moe": (1, {"eager", "grouped_mm", "dense"}),
}


@pytest.mark.parametrize(("command", "lines", "peers"), [(name, *of) for name, of in COMMANDS.items()])
def test_every_benchmark_times_kpt_beside_its_peers(kpt, made_up_times, command, lines, peers) -> None:
    result = kpt("bench", *command.split(), "--quick", "--dtype", "bfloat16", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["lines"]
    assert len(found) == lines
    for line in found:
        first, *others = line["results"]
        assert first["implementation"] == "kpt"
        assert peers - {"_scaled_mm"} <= {other["implementation"] for other in others} <= peers
        assert [other["gain"] for other in others] == [2.0, 3.0, 4.0][: len(others)]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_busy_machine_has_one_note_above_the_table_and_no_figures(kpt, made_up_times, monkeypatch, command) -> None:
    made_up_times += [STEADY, NOISY]
    monkeypatch.setattr(kpt_optimize.Load, "others", lambda load: 0.5)
    arguments = ["bench", *command.split(), "--quick", "--dtype", "bfloat16"]
    shown, document = kpt(*arguments), kpt(*arguments, "--json")
    assert (shown.exit_code, document.exit_code) == (0, 0), shown.output
    assert shown.output.count("the machine is busy") == 1
    assert shown.output.index("the machine is busy") < shown.output.index("dtype")
    assert "too noisy" in shown.output
    assert "x faster" not in shown.output
    for line in json.loads(document.stdout)["lines"]:
        assert all(other["gain"] is None and other["noise"] > 0.2 for other in line["results"][1:])


def test_what_is_wrong_has_no_figures(kpt, made_up_times, monkeypatch) -> None:
    monkeypatch.setattr(fp8, "linear", lambda x, codes, scale: torch.ones(len(x), len(codes), dtype=x.dtype))
    result = kpt("bench", "fp8", "--quick")
    assert result.exit_code == 1
    assert result.stdout.count("wrong") == 3
    assert "no figures for fp8.linear, 1 x 32 x 16 in torch.bfloat16: KPT's error" in result.stderr


def test_flex_attention_has_no_training_step(kpt) -> None:
    result = kpt("bench", "attention", "--train", "--flex")
    assert result.exit_code == 2
    assert "--flex is for the forward alone" in result.stderr
