"""How a row of `kpt bench cpu` is measured: the gate, turns, floors, and who is absent."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import kpt_core
from kpt_cli.bench.cpu import measuring
from kpt_cli.bench.cpu.ceilings import Ceilings, Probe, Work, last_cache, measure_ceilings
from kpt_cli.bench.cpu.contest import Contest, Contestant, Trial, in_plain_pytorch
from kpt_cli.bench.cpu.measuring import measure
from kpt_cli.bench.moe import GateError
from kpt_core.registry import add_backend, remove_backend
from kpt_moe.experts import experts
from kpt_optimize import measure as measure_module

READ = Probe("reading", lambda: None, amount=1000, rate=100.0)
FP32 = Probe("products in float32", lambda: None, amount=10, rate=50.0)
BF16 = Probe("products in bfloat16", lambda: None, amount=20, rate=200.0)
CEILINGS = Ceilings(READ, {torch.float32: FP32, torch.bfloat16: BF16})
EXACT = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float64)


@pytest.fixture
def spend(monkeypatch):
    """Make calls that take an exact time, by a clock of the test."""
    clock = SimpleNamespace(now=0.0)
    for module in (measuring, measure_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def taking(seconds):
        def call():
            clock.now += seconds

        return call

    return taking


def answering(name, role="peer", off=0.0, calls=None, dtype=torch.float32):
    """A contestant whose last number is off by `off`."""
    given = EXACT.float() + torch.tensor([0.0, 0.0, off])
    trial = Trial(lambda: (given,), (EXACT,))
    return Contestant(name, role, dtype, calls or [lambda: given], [trial])


def contest(*contestants, **changes):
    made = Contest(
        group="group",
        name="name",
        sizes={"tokens": 1},
        dtype="fp32",
        work=Work(flops=10, bytes=5, products=(torch.float32,)),
        rotation=7,
        contestants=contestants,
        yardstick="eager",
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("work", "probe", "seconds", "share"),
    [
        (Work(10, 100, (torch.float32,)), READ, 1.0, 0.1),
        (Work(100, 100, (torch.float32,)), FP32, 2.0, 10.0),
        # The faster of the dtypes that hold the operands sets the floor.
        (Work(400, 100, (torch.bfloat16, torch.float32)), BF16, 2.0, 20.0),
        (Work(100, 100, (torch.bfloat16, torch.float32)), READ, 1.0, 0.1),
    ],
)
def test_floor_is_the_longer_of_reading_and_multiplying(work, probe, seconds, share):
    floor = CEILINGS.floor(work)
    assert floor.bound_by is probe
    assert floor.seconds == pytest.approx(seconds)
    assert floor.share == pytest.approx(share)


def test_share_is_of_the_floor_that_the_probe_reaches_in_turn_with_kpt(spend):
    # The probe takes 4 ms for ten times the work, so that the floor of this work is 0.4 ms; KPT takes 2 ms.
    slow = replace(READ, call=spend(0.004), amount=50, rate=1e4)
    kpt = answering("kpt", "kpt", calls=[spend(0.002)])
    row = measure(contest(kpt, work=Work(0, 5, (torch.float32,))), replace(CEILINGS, read=slow), 0.1)
    assert row.bound_by == "reading"
    assert row.floor == pytest.approx(0.0004)
    assert row.share == pytest.approx(0.2)


def test_ratios_are_over_kpt_and_the_best_peer_is_the_fastest_one(spend):
    row = measure(
        contest(
            answering("kpt", "kpt", calls=[spend(0.002)]),
            answering("eager", calls=[spend(0.007), spend(0.008), spend(0.009)]),
            answering("grouped_mm", calls=[spend(0.004)]),
            answering("dense", "dense", calls=[spend(0.001)]),
        ),
        CEILINGS,
        0.15,
    )
    assert row.best_peer is not None
    assert row.best_peer.implementation == "grouped_mm"
    assert [result.implementation for result in row.results] == ["kpt", "eager", "grouped_mm", "dense"]
    assert [result.gain for result in row.results] == pytest.approx([1, 4, 2, 0.5])
    assert row.as_dict()["gain"] == pytest.approx(2)
    assert row.results[1].low == pytest.approx(0.007)
    assert row.results[1].high == pytest.approx(0.009)


def test_what_only_its_first_call_takes_long_is_timed_as_often_as_the_others(spend):
    first, given = spend(5.0), EXACT.float()
    reordering = replace(answering("ipex", calls=[spend(0.003)]), trials=[Trial(lambda: first() or (given,), (EXACT,))])
    row = measure(contest(answering("kpt", "kpt", calls=[spend(0.002)]), reordering), CEILINGS, 0.1)
    assert row.results[1].rounds == row.results[0].rounds > 1
    assert row.results[1].gain == pytest.approx(1.5)


def test_a_timing_of_several_calls_in_a_row_is_told_for_one(spend):
    slow = replace(READ, call=spend(0.004), amount=50, rate=1e4)
    kpt = answering("kpt", "kpt", calls=[spend(0.001), spend(0.003)])
    eager = answering("eager", calls=[spend(0.002), spend(0.004), spend(0.006), spend(0.008)])
    many = contest(kpt, eager, in_a_row=4, work=Work(0, 5, (torch.float32,)))
    row = measure(many, replace(CEILINGS, read=slow), 0.5)
    assert [(result.low, result.high) for result in row.results] == [pytest.approx((t, t)) for t in (0.002, 0.005)]
    assert row.results[1].gain == pytest.approx(2.5)
    assert row.share == pytest.approx(0.2)


@pytest.mark.parametrize("role", ["kpt", "peer", "own", "dense"])
def test_a_wrong_result_of_anybody_is_refused(role):
    name = "kpt" if role == "kpt" else "somebody"
    others = [] if role == "kpt" else [answering("kpt", "kpt")]
    with pytest.raises(GateError, match=rf"no figures for group name in fp32: {name} is off by 2\.50e-03"):
        measure(contest(*others, answering(name, role, off=0.01)), CEILINGS, 0.01)


def test_nan_is_wrong():
    with pytest.raises(GateError, match="kpt is off by nan"):
        measure(contest(answering("kpt", "kpt", off=float("nan"))), CEILINGS, 0.01)


def test_kpt_must_be_as_accurate_as_the_yardstick():
    kpt, eager = answering("kpt", "kpt", off=3e-5), answering("eager", off=1e-5)
    with pytest.raises(GateError, match="KPT's error against float64 is"):
        measure(contest(kpt, eager), CEILINGS, 0.01)
    measure(contest(kpt, answering("eager", off=3e-5)), CEILINGS, 0.01)
    measure(contest(kpt, eager, margins=(4, 4)), CEILINGS, 0.01)


def test_a_peer_that_cannot_run_is_absent_with_what_it_said():
    def fail():
        raise NotImplementedError("no such kernel\non this machine")

    row = measure(contest(answering("kpt", "kpt"), answering("eager", calls=[fail])), CEILINGS, 0.01)
    assert row.absent == {"eager": "NotImplementedError: no such kernel"}
    assert row.best_peer is None
    assert row.as_dict()["gain"] is None


def test_kpt_that_cannot_run_is_an_error():
    def fail():
        raise NotImplementedError("no such kernel")

    with pytest.raises(NotImplementedError):
        measure(contest(answering("kpt", "kpt", calls=[fail])), CEILINGS, 0.01)


@pytest.mark.parametrize(("kpt", "seconds", "rounds"), [(0.1, 1.0, 1), (0.1, 0.45, 3), (0.3, 1.0, 3), (0.01, 0.4, 3)])
def test_what_takes_long_and_is_several_times_slower_is_timed_once(spend, kpt, seconds, rounds):
    row = measure(
        contest(answering("kpt", "kpt", calls=[spend(kpt)]), answering("eager", calls=[spend(seconds)])), CEILINGS, 1.0
    )
    result = row.results[1]
    assert result.rounds == rounds
    assert (result.noise is None) == (rounds == 1)
    assert result.gain == pytest.approx(seconds / kpt)


def test_what_takes_minutes_gets_one_round(spend):
    kpt = answering("kpt", "kpt", calls=[spend(30)])
    row = measure(contest(kpt, answering("eager", calls=[spend(60)])), CEILINGS, 3.0)
    assert [result.rounds for result in row.results] == [1, 1]
    assert row.results[1].gain == pytest.approx(2)


def test_calls_take_turns_and_two_contestants_never_make_the_same_call_in_a_row():
    made = []
    contestants = [
        answering(name, role, calls=[lambda turn=turn, name=name: made.append((name, turn)) for turn in range(4)])
        for name, role in (("kpt", "kpt"), ("eager", "peer"), ("grouped_mm", "peer"))
    ]
    measure(contest(*contestants), CEILINGS, 0.1)
    rounds = made[4 : 4 + 3 * 12]  # before them KPT is looked at, and each is estimated
    assert {turn for name, turn in rounds if name == "kpt"} == {0, 1, 2, 3}
    # By rounds: from one to the next another one comes first, and a whole round was between equal calls.
    for first in range(0, len(rounds), 3):
        assert len({turn for _, turn in rounds[first : first + 3]}) == 3


def test_a_row_lets_go_of_the_weights():
    assert measure(contest(answering("kpt", "kpt")), CEILINGS, 0.01).contest.contestants == ()


def call_experts():
    x, index, weights = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    return experts(x, index, weights, torch.ones(2, 6, 4), torch.ones(2, 4, 3))


def call_gating():
    return kpt_core.get_op("moe.top_k_gating")(torch.ones(2, 4), top_k=1)


@pytest.mark.parametrize(
    ("call", "backend", "kernel"),
    [
        (call_gating, "reference", "moe.top_k_gating: reference"),
        (call_experts, "torch", "moe.experts: kpt_moe.torch_kernels.experts_loop:forward"),
    ],
)
def test_plain_pytorch_is_left_out_where_kpt_runs_in_it_anyway(call, backend, kernel):
    row = measure(contest(answering("kpt", "kpt", calls=[call]), answering("plain", "plain")), CEILINGS, 0.01)
    assert (row.backend, row.kernels) == (backend, (kernel,))
    assert "plain" in row.absent


class Vendor(kpt_core.Backend):
    """A backend for two ops."""

    name, device_types = "vendor", ("cpu",)

    def kernels(self):
        return [kpt_core.Kernel(op, f"{__name__}:no_kernel") for op in ("moe.experts", "moe.top_k_gating")]


def no_kernel(call):
    raise AssertionError("it is not to run")


def test_in_plain_pytorch_no_vendors_kernel_runs():
    add_backend(Vendor())
    try:
        with kpt_core.record() as log:
            for call in (call_experts, call_gating):
                with pytest.raises(AssertionError, match="it is not to run"), kpt_core.use("vendor"):
                    call()
                in_plain_pytorch(call)()
    finally:
        remove_backend("vendor")
    assert [(selection.op, selection.backend) for selection in log] == [
        ("moe.experts", "torch"),
        ("moe.top_k_gating", "reference"),
    ]


def test_ceilings_are_measured():
    ceilings = measure_ceilings(quick=True)
    report = ceilings.as_dict()
    assert report["read_bytes"] >= 2 * last_cache()
    assert report["read_bytes_per_second"] > 1e8
    assert set(report["product_flops_per_second"]) == {"float32", "bfloat16", "float16"}
    assert "GB/s" in ceilings.summary()
