"""The benchmark refuses what is wrong, times all in turn, and has its rows; `nox -s bench` and `tools/gpu` run it."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import devices
import experts
import harness
import loads
import timing
from devices import Ceilings, Probe, Work
from harness import Contest, Contestant, GateError, Row, measure

import bench
import kpt_core
from kpt_cli.bench.moe import Shape
from kpt_core.registry import add_backend, remove_backend
from kpt_fp8 import quantize_to_fp8
from kpt_moe.experts import experts as experts_op

CPU, FP32 = torch.device("cpu"), torch.float32
EXACT = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)
READ = Probe("reading", lambda: None, amount=1000, rate=100.0)
PRODUCTS = {
    torch.float32: Probe("products in float32", lambda: None, amount=10, rate=50.0),
    torch.bfloat16: Probe("products in bfloat16", lambda: None, amount=20, rate=200.0),
}
CEILINGS = Ceilings(READ, PRODUCTS)
DECODE = Shape("decode", 4, 64, 32, 8, 2, gated=True)
MANY = Shape("many", 64, 16, 32, 4, 2, gated=False)


@pytest.fixture
def spend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Callable[[], None]]:
    """Make calls that take an exact time, by a clock of the test."""
    clock = SimpleNamespace(now=0.0)
    for module in (devices, timing):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def taking(seconds: float) -> Callable[[], None]:
        def call() -> None:
            clock.now += seconds

        return call

    return taking


def answering(name: str, role: Any = "peer", off: float = 0.0, calls: Any = None) -> Contestant:
    """Return a contestant whose last number is off by `off`."""
    given = EXACT.float() + torch.tensor([0.0, 0.0, off])
    return Contestant(name, role, FP32, calls or [lambda: given], lambda: [given], [EXACT])


def contest(*contestants: Contestant, **changes: Any) -> Contest:
    made = Contest(
        group="group",
        name="name",
        sizes={"tokens": 1},
        dtype="fp32",
        work=Work(flops=10, bytes=5, products=(FP32,)),
        contestants=contestants,
        yardstick="eager",
    )
    return replace(made, **changes)


def measured(given: Contest, seconds: float = 0.01, ceilings: Ceilings = CEILINGS) -> Row:
    return measure(given, ceilings, seconds, CPU)


@pytest.mark.parametrize(
    ("work", "probe", "share"),
    [
        (Work(10, 100, (FP32,)), READ, 0.1),
        (Work(100, 100, (FP32,)), PRODUCTS[FP32], 10.0),
        # The faster of the dtypes that hold the operands sets the floor.
        (Work(400, 100, (torch.bfloat16, FP32)), PRODUCTS[torch.bfloat16], 20.0),
    ],
)
def test_floor_is_the_longer_of_reading_and_multiplying(work: Work, probe: Probe, share: float) -> None:
    bound_by, found = CEILINGS.floor(work)
    assert bound_by is probe
    assert found == pytest.approx(share)


def test_ratios_are_over_kpt_and_the_floor_is_that_of_the_same_rounds(spend: Any) -> None:
    row = measured(
        contest(
            answering("kpt", "kpt", calls=[spend(0.002)]),
            answering("eager", calls=[spend(0.007), spend(0.008), spend(0.009)]),
            answering("grouped_mm", calls=[spend(0.004)]),
            answering("dense", "dense", calls=[spend(0.001)]),
            in_a_row=1,
            work=Work(0, 5, (FP32,)),
            wanted={"over grouped_mm": 1.5, "floor": 0.5},
        ),
        0.3,
        Ceilings(replace(READ, call=spend(0.004), amount=50, rate=1e4), PRODUCTS),
    )
    assert row.best_peer is not None
    assert row.best_peer.implementation == "grouped_mm"
    assert [result.gain.value for result in row.results] == pytest.approx([1, 4, 2, 0.5])
    assert (row.results[1].gain.low, row.results[1].gain.high) == pytest.approx((3.5, 4.5))
    # The probe takes 4 ms for ten times the work, so that its floor is 0.4 ms.
    assert row.share.value == pytest.approx(0.2)
    assert [met for *_, met in row.targets] == [True, False]


def test_several_calls_in_a_row_are_timed_as_one(spend: Any) -> None:
    row = measured(contest(answering("kpt", "kpt", calls=[spend(0.001), spend(0.003)]), in_a_row=2))
    assert row.results[0].seconds == pytest.approx(0.002)


@pytest.mark.parametrize(("seconds", "rounds"), [(1.0, 1), (0.35, 3)])
def test_what_takes_long_and_is_several_times_slower_is_timed_once(spend: Any, seconds: float, rounds: int) -> None:
    kpt, eager = (answering(n, r, calls=[spend(s)]) for n, r, s in (("kpt", "kpt", 0.1), ("eager", "peer", seconds)))
    result = measured(contest(kpt, eager), 0.4).results[1]
    assert result.rounds == rounds
    assert result.gain.value == pytest.approx(seconds / 0.1)


@pytest.mark.parametrize("off", [0.01, float("nan")])
def test_kpt_that_is_wrong_is_refused_and_a_peer_that_is_wrong_is_absent(off: float) -> None:
    with pytest.raises(GateError, match=r"no figures for group name in fp32: kpt is off by"):
        measured(contest(answering("kpt", "kpt", off=off)))
    row = measured(contest(answering("kpt", "kpt"), answering("eager", off=off)))
    assert "eager is off by" in row.absent["eager"]
    assert row.best_peer is None


def test_kpt_must_be_as_accurate_as_the_yardstick() -> None:
    kpt, eager = answering("kpt", "kpt", off=3e-5), answering("eager", off=1e-5)
    with pytest.raises(GateError, match="KPT's error against float64 is"):
        measured(contest(kpt, eager))
    measured(contest(kpt, eager, margins=(4.0, 4.0)))


def test_a_peer_that_cannot_run_is_absent_with_what_it_said_and_kpt_is_an_error() -> None:
    def fail() -> None:
        raise NotImplementedError("no such kernel\non this machine")

    row = measured(contest(answering("kpt", "kpt"), answering("eager", calls=[fail])))
    assert row.absent == {"eager": "NotImplementedError: no such kernel"}
    with pytest.raises(NotImplementedError):
        measured(contest(answering("kpt", "kpt", calls=[fail])))


def test_what_autograd_saves_is_counted_without_the_parameters() -> None:
    parameter, x = torch.ones(64, 64, requires_grad=True), torch.ones(4, 64, requires_grad=True)
    kpt = answering("kpt", "kpt", calls=[lambda: torch.autograd.grad((x @ parameter).sum(), [x, parameter])])
    row = measured(contest(kpt, training=True, parameters=[parameter], least_saved=x.nbytes))
    assert row.results[0].saved == 1


class Offering(kpt_core.Backend):
    """A backend of one kernel of this file."""

    name = "offering"
    device_types = ("cpu",)

    def __init__(self, op: str, kernel: str) -> None:
        self.kernel = kpt_core.Kernel(op, f"{__name__}:{kernel}", differentiable=True)

    def kernels(self) -> list[kpt_core.Kernel]:
        """Return the kernel."""
        return [self.kernel]


def right_experts(call: kpt_core.Call) -> Any:
    return experts_op.run_reference(call)


def experts_of_last_choice_only(call: kpt_core.Call) -> Any:
    last = {name: getattr(call, name)[:, -1:] for name in ("top_k_index", "top_k_weights")}
    return experts_op.run_reference(call._replace(**last))


def product_without_scales(call: kpt_core.Call) -> Any:
    return kpt_core.get_op("moe.scaled_grouped_mm").run_reference(call._replace(scale=torch.ones_like(call.scale)))


def gating_without_bias(call: kpt_core.Call) -> Any:
    bias = torch.zeros_like(call.logits[0])
    return kpt_core.get_op("moe.top_k_gating").run_reference(call._replace(correction_bias=bias))


@pytest.fixture
def offering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Offer a kernel while the test runs; of a small cache few copies are made."""
    monkeypatch.setattr(loads, "last_cache", lambda: 2**12)
    monkeypatch.setenv("KPT_DISABLE", "cpu")
    kpt_core.refresh()
    yield lambda op, kernel: add_backend(Offering(op, kernel))
    remove_backend("offering")
    monkeypatch.undo()
    kpt_core.refresh()


def test_plain_pytorch_stands_beside_a_vendors_kernel(offering: Any) -> None:
    offering("moe.experts", "right_experts")
    row = measured(loads.experts_contest("decode", DECODE, torch.bfloat16, CPU, 0, scheme="row"))
    assert row.backend == "offering"
    assert [result.implementation for result in row.results][:3] == ["kpt", "plain", "kpt bf16"]


@pytest.mark.parametrize(
    ("group", "options"),
    [("decode", {}), ("decode", {"scheme": "128x128"}), ("prefill", {}), ("step", {}), ("step", {"gpt_oss": True})],
)
def test_wrong_experts_are_refused(offering: Any, group: str, options: dict[str, Any]) -> None:
    offering("moe.experts", "experts_of_last_choice_only")
    dtype = torch.bfloat16 if "scheme" in options else FP32
    with pytest.raises(GateError, match=f"no figures for {group} decode in .*: kpt is off by"):
        measured(loads.experts_contest(group, DECODE, dtype, CPU, 0, **options))


@pytest.mark.parametrize(
    ("op", "kernel", "make"),
    [
        ("moe.scaled_grouped_mm", "product_without_scales", lambda: loads.product_contest(160, 16, "row", CPU, 0)),
        ("moe.top_k_gating", "gating_without_bias", lambda: loads.gating_contest(16, 64, 8, CPU, 0, sigmoid=True)),
    ],
)
def test_a_wrong_product_or_gating_is_refused(offering: Any, op: str, kernel: str, make: Any) -> None:
    offering(op, kernel)
    with pytest.raises(GateError, match="no figures for"):
        measured(make())


@pytest.mark.parametrize("fault", range(4))
def test_a_wrong_gradient_is_refused(fault: int) -> None:
    made = loads.experts_contest("step", MANY, FP32, CPU, 0)
    kpt, *others = made.contestants

    def wrong() -> list[Tensor]:
        gradients = list(kpt.check())
        gradients[fault] = gradients[fault] + 1e-3 * gradients[fault].abs().max()
        return gradients

    with pytest.raises(GateError, match="kpt is off by"):
        measured(replace(made, contestants=[replace(kpt, check=wrong), *others]))


def test_bytes_of_a_decode_are_those_of_the_experts_that_are_read() -> None:
    one, matrices, tokens = replace(DECODE, tokens=1), 2 * 3 * 64 * 32, 2 * 64
    work = loads.experts_contest("decode", one, torch.bfloat16, CPU, 0).work
    assert (work.bytes, work.flops) == (2 * matrices + 2 * tokens, 2 * matrices)
    # A byte for each number, and a float32 for each of the 2 * 32 + 64 output channels.
    quantised = loads.experts_contest("decode", one, torch.bfloat16, CPU, 0, scheme="row").work
    assert quantised.bytes == 2 * (matrices // 2 + 4 * 128) + 2 * tokens


def test_consecutive_calls_of_one_token_share_no_expert_and_reach_all_of_both_copies() -> None:
    problem = experts.problem_of(replace(DECODE, tokens=1), torch.bfloat16, CPU, 0, decode=True)
    chosen = [set(index.flatten().tolist()) for index, _ in problem.routings]
    half = len(chosen) // 2  # between the halves of four groups a group follows itself, on the other copy
    for turns in (chosen[:half], chosen[half:]):
        assert set.union(*turns) == set(range(8))
        assert all(not one & following for one, following in pairwise(turns))
    assert len(problem.copies) == 2


@pytest.mark.parametrize("scheme", ["row", "128x128"])
def test_dequantised_multiplies_each_number_by_its_scale(scheme: str) -> None:
    matrix = torch.randn(130, 140, generator=torch.Generator().manual_seed(0))
    narrow = quantize_to_fp8(matrix, granularity=scheme)
    codes, scale = narrow.codes, narrow.scale
    found = experts.dequantised(codes, scale)
    for row, column in ((0, 0), (127, 128), (129, 139)):
        own = scale[row] if scheme == "row" else scale[row // 128, column // 128]
        assert found[row, column] == codes[row, column].double() * own.double()


def test_a_copy_of_too_many_weights_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_MOST_COPIED", 2**10)
    made = loads.experts_contest("prefill", MANY, FP32, CPU, 0)
    assert "GiB of weights" in made.absent["batched_mm"]
    assert [contestant.name for contestant in made.contestants] == ["kpt", "plain", "eager", "grouped_mm", "dense"]


def test_the_program_writes_json_prints_a_table_and_goes_on_after_a_wrong_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = loads._on_cpu(DECODE, (1,), [MANY], 160, (16,))
    monkeypatch.setitem(loads.LOADS["cpu"], True, table)
    monkeypatch.setattr(loads, "last_cache", lambda: 2**12)
    monkeypatch.setattr(
        bench,
        "measure_ceilings",
        lambda device, quick: replace(
            CEILINGS, products=dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), PRODUCTS[FP32])
        ),
    )

    def first_is_wrong(given: Contest, *rest: Any) -> Row:
        if given.group == "gating":
            raise GateError("no figures for this one")
        return harness.measure(given, *rest)

    monkeypatch.setattr(bench, "measure", first_is_wrong)
    output = tmp_path / "figures.json"
    chosen = ("decode", "product", "prefill", "step", "gating", "sorting", "chat", "few rows", "fp8")
    groups = [word for group in chosen for word in ("--group", group)]
    assert bench.main(["--quick", "--seconds", "0.01", "--output", str(output), *groups]) == 1
    lines = json.loads(output.read_text())["lines"]
    rows = {f"{line['group']} {line['dtype']}": line for line in lines if "group" in line}
    assert rows.keys() == {
        *("decode fp32", "decode bf16", "decode fp8 row", "decode fp8 block", "product fp8 row", "product fp8 block"),
        *("prefill fp32", "prefill bf16", "prefill fp16", "step fp32", "step bf16", "sorting int64"),
        *("chat fp32", "chat bf16", "few rows fp32", "few rows bf16", "fp8 fp8 row"),
    }
    assert all(line["results"][0]["implementation"] == "kpt" and line["best_peer"] for line in rows.values())
    everybody = {name: {result["implementation"] for result in line["results"]} for name, line in rows.items()}
    assert everybody["decode fp8 row"] >= {"kpt bf16", "eager bf16", "grouped_mm bf16", "batched_mm bf16", "dense bf16"}
    assert everybody["product fp8 row"] >= {"linear fp32", "linear bf16", "_scaled_mm"}
    assert everybody["few rows bf16"] >= {"kpt fp8", "linear"}
    told = capsys.readouterr()
    assert "no figures for this one" in told.err
    assert "wrong" in told.out
    assert "grouped_mm" in told.out


@pytest.mark.parametrize("given", [["--group", "prefil"], ["-o", "/no/such/folder/figures.json"]])
def test_what_the_program_is_not_made_for_is_refused_at_once(given: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(given)
    assert ended.value.code == 2
