"""`kpt bench cpu`: its rows, what they refuse, and what the command writes."""

import json
import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch

import kpt_core
from kpt_cli.bench.cpu import ceilings as ceilings_module
from kpt_cli.bench.cpu import ipex, product, routing
from kpt_cli.bench.cpu import rows as benchmark
from kpt_cli.bench.cpu.ceilings import Ceilings, Probe
from kpt_cli.bench.cpu.experts import decode_contests, prefill_contest
from kpt_cli.bench.cpu.float8 import dequantised
from kpt_cli.bench.cpu.product import product_contest
from kpt_cli.bench.cpu.routing import gating_contest, sorting_contest
from kpt_cli.bench.cpu.rows import GROUPS, Plan
from kpt_cli.bench.cpu.step import step_contest
from kpt_cli.bench.moe import GateError, Shape, dense_layers, transformers_experts
from kpt_core.registry import add_backend, remove_backend
from kpt_moe.experts import experts
from kpt_moe.quantised_experts import quantise_weights

DECODE = Shape("decode", 1, 64, 32, 8, 2, gated=True)
MANY = Shape("many", 64, 16, 32, 4, 2, gated=False)
TINY = Plan(
    decode=DECODE,
    tokens=(1, 4),
    prefill=((MANY, (torch.float32, torch.float16)),),
    step=((MANY, (torch.bfloat16,)),),
    product=160,
    rows=(1,),
    routing=(1, 16),
)
CEILINGS = Ceilings(
    Probe("reading", lambda: None, 2**20, 1e10),
    {dtype: Probe("products", lambda: None, 2**20, 1e11) for dtype in (torch.float32, torch.bfloat16, torch.float16)},
)


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch):
    """Of a small cache few copies are made."""
    for module in (product, routing):
        monkeypatch.setattr(module, "last_cache", lambda: 2**12)


class Offering(kpt_core.Backend):
    """A backend of one kernel of this file."""

    name = "offering"
    device_types = ("cpu",)

    def __init__(self, op, kernel):
        self.kernel = kpt_core.Kernel(op, f"{__name__}:{kernel}", differentiable=True)

    def kernels(self):
        return [self.kernel]


def experts_as_they_are(call):
    return experts.run_reference(call)


def experts_of_last_choice_only(call):
    last = {name: getattr(call, name)[:, -1:] for name in ("top_k_index", "top_k_weights")}
    return experts.run_reference(call._replace(**last))


def product_without_scales(call):
    return kpt_core.get_op("moe.scaled_grouped_mm").run_reference(call._replace(scale=torch.ones_like(call.scale)))


def gating_without_bias(call):
    bias = torch.zeros_like(call.logits[0])
    return kpt_core.get_op("moe.top_k_gating").run_reference(call._replace(correction_bias=bias))


@pytest.fixture
def offering():
    """Offer a kernel while the test runs."""

    def add(op, kernel):
        add_backend(Offering(op, kernel))

    yield add
    remove_backend("offering")


def measured(contest):
    return benchmark.measure(contest, CEILINGS, 0.01)


def decode(dtype=torch.bfloat16, tokens=(1, 4)):
    return {(c.name, c.dtype): c for c in decode_contests(DECODE, tokens, dtype, seed=0)}


def test_every_group_has_its_rows():
    rows = list(benchmark.rows(TINY, CEILINGS, GROUPS, seconds=0.01, seed=0))
    assert [(row.title, row.contest.dtype) for row in rows] == [
        ("decode 1 token", "fp32"),
        ("decode 4 tokens", "fp32"),
        *((f"decode {count}", name) for count in ("1 token", "4 tokens") for name in ("bf16", "fp8 row", "fp8 block")),
        ("product 160 x 160, M=1", "fp8 row"),
        ("product 160 x 160, M=1", "fp8 block"),
        ("prefill many", "fp32"),
        ("prefill many", "fp16"),
        ("step many", "bf16"),
        ("gating softmax, 8 of 64, 1 token", "fp32"),
        ("gating sigmoid, 8 of 256, 1 token", "fp32"),
        ("gating softmax, 8 of 64, 16 tokens", "fp32"),
        ("gating sigmoid, 8 of 256, 16 tokens", "fp32"),
        ("sorting 8 of 64, 1 token", "int64"),
        ("sorting 8 of 64, 16 tokens", "int64"),
    ]
    for row in rows:
        assert row.results[0].implementation == "kpt"
        assert row.best_peer is not None, row.title
        assert row.share > 0
        json.dumps(row.as_dict(), allow_nan=False)
    everybody = {row.title: {result.implementation for result in row.results} for row in rows}
    assert everybody["decode 1 token"] >= {"kpt bf16", "eager bf16", "grouped_mm bf16", "batched_mm bf16"}
    assert everybody["product 160 x 160, M=1"] >= {"linear fp32", "linear bf16", "_scaled_mm"}
    assert everybody["prefill many"] >= {"eager", "grouped_mm", "batched_mm", "dense"}
    assert everybody["step many"] >= {"eager", "grouped_mm"}


def test_only_the_groups_that_are_wanted():
    rows = list(benchmark.rows(TINY, CEILINGS, ["sorting"], seconds=0.01, seed=0))
    assert {row.contest.group for row in rows} == {"sorting"}


def test_bytes_of_a_decode_are_those_of_the_experts_that_are_read():
    contests = decode()
    matrices, tokens = 2 * 3 * 64 * 32, 2 * 64
    assert contests["1 token", "bf16"].work.bytes == 2 * matrices + 2 * tokens
    assert contests["1 token", "bf16"].work.flops == 2 * matrices
    # A byte for each number, and a float32 for each of the 2 * 32 + 64 output channels.
    assert contests["1 token", "fp8 row"].work.bytes == 2 * (matrices // 2 + 4 * 128) + 2 * tokens
    assert contests["1 token", "bf16"].rotation == 2 * 8 * 2 * 3 * 64 * 32
    assert decode(torch.float32)["1 token", "fp32"].rotation == 8 * 4 * 3 * 64 * 32


def test_consecutive_calls_of_one_token_share_no_expert_and_reach_all():
    kpt = decode()["1 token", "bf16"].contestants[0]
    chosen = [set(call.args[2].flatten().tolist()) for call in kpt.calls]
    assert set.union(*chosen) == set(range(8))
    half = len(chosen) // 2  # between the halves of four groups a group follows itself, on the other copy
    for turns in (chosen[:half], chosen[half:]):
        assert all(not one & following for one, following in pairwise(turns))


def test_calls_take_turns_over_copies_of_the_weights():
    kpt, *_ = decode()["4 tokens", "bf16"].contestants
    copies = [call.args[0] for call in kpt.calls]
    assert copies == [0, 1] * (len(copies) // 2)


def test_short_calls_are_timed_several_in_a_row():
    assert {c.in_a_row for c in (*decode().values(), product_contest(160, 1, "row", seed=0))} == {4}
    assert prefill_contest(MANY, torch.float32, seed=0).in_a_row == 1


def test_dense_feed_forwards_have_the_operations_of_the_experts():
    module = transformers_experts(DECODE, torch.float32, torch.Generator().manual_seed(0))
    layers = dense_layers(DECODE, module)
    assert [(list(up.shape), list(down.shape)) for up, down in layers] == [([128, 64], [64, 64])] * 4
    assert 2 * sum(matrix.numel() for matrix in layers[0]) == DECODE.flops
    module = transformers_experts(MANY, torch.float32, torch.Generator().manual_seed(0))
    ((up, down),) = dense_layers(MANY, module)
    assert 2 * MANY.tokens * MANY.top_k * (up.numel() + down.numel()) == MANY.flops


@pytest.mark.parametrize("scheme", ["row", "block128"])
def test_dequantised_multiplies_each_number_by_its_scale(scheme):
    codes, scale = quantise_weights(torch.randn(1, 130, 140, generator=torch.Generator().manual_seed(0)), scheme)
    found = dequantised(codes[0], scale[0])
    for row, column in ((0, 0), (127, 128), (129, 139)):
        own = scale[0, row] if scheme == "row" else scale[0, row // 128, column // 128]
        assert found[row, column] == codes[0, row, column].double() * own.double()


def test_the_kernel_that_ran_is_told_and_plain_pytorch_stands_beside_it(offering):
    offering("moe.experts", "experts_as_they_are")
    row = measured(decode(tokens=(1,))["1 token", "fp8 row"])
    assert row.backend == "offering"
    assert row.kernels[0] == f"moe.experts: {__name__}:experts_as_they_are"
    assert [result.implementation for result in row.results][:3] == ["kpt", "plain", "kpt bf16"]


@pytest.mark.parametrize("dtype", ["bf16", "fp8 row", "fp8 block"])
def test_wrong_experts_are_refused(offering, dtype):
    offering("moe.experts", "experts_of_last_choice_only")
    with pytest.raises(GateError, match=f"no figures for decode 4 tokens in {dtype}: kpt is off by"):
        measured(decode(tokens=(4,))["4 tokens", dtype])


def test_wrong_experts_of_a_prefill_and_a_step_are_refused(offering):
    offering("moe.experts", "experts_of_last_choice_only")
    for contest in (prefill_contest(MANY, torch.float32, 0), step_contest(MANY, torch.float32, 0)):
        with pytest.raises(GateError, match=f"no figures for {contest.group} many in fp32: kpt is off by"):
            measured(contest)


@pytest.mark.parametrize("scheme", ["row", "block128"])
def test_a_wrong_product_is_refused(offering, scheme):
    offering("moe.scaled_grouped_mm", "product_without_scales")
    with pytest.raises(GateError, match="no figures for product"):
        measured(product_contest(160, 16, scheme, seed=0))


def test_wrong_gating_is_refused(offering):
    offering("moe.top_k_gating", "gating_without_bias")
    with pytest.raises(GateError, match="no figures for gating"):
        measured(gating_contest(16, 64, 8, 0, sigmoid=True))


def test_a_wrong_order_is_refused(monkeypatch):
    def reversed_order(index, num_experts):
        order, offsets = routing._torch_sort(index, experts=num_experts)
        return order.flip(0), offsets

    monkeypatch.setattr(routing, "sort_by_expert", reversed_order)
    with pytest.raises(GateError, match="no figures for sorting"):
        measured(sorting_contest(16, 64, 8, 0))


def test_a_wrong_peer_is_refused_too(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **_: torch.zeros(a.shape[0], b.shape[1]))
    with pytest.raises(GateError, match="_scaled_mm is off by"):
        measured(product_contest(160, 1, "row", seed=0))


def test_a_copy_of_too_many_weights_is_not_made(monkeypatch):
    monkeypatch.setattr("kpt_cli.bench.cpu.experts._MOST_COPIED", 2**10)
    contest = prefill_contest(MANY, torch.float32, 0)
    assert "batched_mm" not in {contestant.name for contestant in contest.contestants}
    assert "GiB of weights" in contest.absent["batched_mm"]


def test_ipex_is_absent_with_a_reason_where_it_is_not_installed():
    assert "is not installed" in decode(tokens=(1,))["1 token", "bf16"].absent["ipex"]


def test_ipex_is_a_peer_where_it_is_installed_simulated(monkeypatch):
    """The module that IPEX has is simulated by one of the same signature, which asks the routing function.

    As IPEX does, it brings the weights that it was given into another order, in place, when it is called.
    """

    class GatedMLPMOE:
        def __init__(self, W13, W2, W3=None, use_prepack=True):
            self.up, self.down = W13, W2

        def __call__(self, hidden_states, use_grouped_topk, top_k, router_logits, renormalize, **options):
            asked = {"hidden_states": hidden_states, "gating_output": router_logits, "topk": top_k}
            weights, index = options["custom_routing_function"](**asked, renormalize=renormalize)
            out = experts.reference(hidden_states, index, weights, self.up, self.down)
            self.up, self.down, given = self.up.clone(), self.down.clone(), (self.up, self.down)
            for tensor in given:
                tensor.zero_()
            return out

    modules = ModuleType("intel_extension_for_pytorch.llm.modules")
    modules.GatedMLPMOE = GatedMLPMOE
    for name in ("intel_extension_for_pytorch", "intel_extension_for_pytorch.llm"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, modules.__name__, modules)
    monkeypatch.setattr(ipex, "installed_version", lambda name: "2.8.0")
    contests = decode(tokens=(4,))
    measured(contests["4 tokens", "bf16"])
    row = measured(contests["4 tokens", "fp8 row"])
    assert "ipex bf16" in {result.implementation for result in row.results if result.role == "peer"}
    assert "ipex" not in row.absent


def test_the_last_cache_is_read_from_the_system(monkeypatch, tmp_path):
    for index, size in enumerate(("32K", "1024K", "96M")):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(f"{size}\n")
    monkeypatch.setattr(ceilings_module, "_CACHES", tmp_path)
    assert ceilings_module.last_cache() == 96 * 2**20
    monkeypatch.setattr(ceilings_module, "_CACHES", tmp_path / "nothing")
    assert ceilings_module.last_cache() == 32 * 2**20


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(benchmark, "QUICK", TINY)
    monkeypatch.setattr(ceilings_module, "measure_ceilings", lambda *, quick: CEILINGS)


@pytest.mark.usefixtures("tiny")
def test_command_writes_json_and_a_plot(kpt, tmp_path):
    output = tmp_path / "figures.json"
    result = kpt("bench", "cpu", "--quick", "--group", "product", "--group", "sorting", "--json", "-o", output)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(output.read_text())
    assert {line["group"] for line in report["lines"]} == {"product", "sorting"}
    assert report["machine"]["threads"] == torch.get_num_threads()
    assert report["ceilings"]["read_bytes_per_second"] == 1e10
    assert all(line["rotation_bytes"] > 0 for line in report["lines"])
    plot = (tmp_path / "figures.svg").read_text()
    assert "product 160 x 160, M=1, fp8 row" in plot
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "figures.svg"]


@pytest.mark.usefixtures("tiny")
def test_command_prints_a_table(kpt, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    result = kpt("bench", "cpu", "--quick", "--group", "product")
    assert result.exit_code == 0, result.output
    assert "10.0 GB/s read" in result.stdout
    assert "_scaled_mm" in result.stdout


@pytest.mark.usefixtures("tiny")
def test_a_wrong_result_alone_has_a_report_and_no_plot(kpt, offering, monkeypatch, tmp_path):
    monkeypatch.setattr(kpt_core, "refresh", lambda: None)  # which would forget the wrong kernel
    offering("moe.scaled_grouped_mm", "product_without_scales")
    result = kpt("bench", "cpu", "--quick", "--group", "product", "-o", tmp_path / "figures.json")
    assert result.exit_code == 1
    assert "no figures for product" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    lines = json.loads((tmp_path / "figures.json").read_text())["lines"]
    assert all("seconds" not in line and line["reason"].startswith("no figures") for line in lines)


def test_unknown_group_is_refused(kpt):
    result = kpt("bench", "cpu", "--group", "prefil")
    assert result.exit_code == 2
    assert "did you mean prefill?" in result.stderr


@pytest.mark.parametrize(
    ("backends", "said"),
    [
        ({}, "kpt-backend-cpu is not installed: KPT runs in plain PyTorch"),
        ({"cpu": SimpleNamespace(unavailable=lambda: None)}, "kpt-backend-cpu serves"),
        (
            {"cpu": SimpleNamespace(unavailable=lambda: "no compiler")},
            "KPT runs in plain PyTorch: no compiler",
        ),
    ],
)
def test_says_whether_there_are_native_kernels(monkeypatch, backends, said):
    from kpt_cli.bench.cpu.report import native_kernels

    monkeypatch.setattr(kpt_core, "backends", lambda: backends)
    assert native_kernels() == said


def test_a_row_with_a_wrong_result_is_marked_and_the_others_are_measured(kpt, monkeypatch):
    from kpt_cli.bench.cpu import rows

    measure = rows.measure

    def first_is_wrong(contest, ceilings, seconds):
        if "float32" in contest.dtype or contest.dtype == "fp32":
            raise GateError("no figures for this one")
        return measure(contest, ceilings, seconds)

    monkeypatch.setattr(rows, "measure", first_is_wrong)
    result = kpt("bench", "cpu", "--quick", "--group", "step", "--seconds", "0.1")
    assert result.exit_code == 1, result.output
    assert "kpt: error: no figures for this one" in result.stderr
    marked = [line for line in result.stdout.splitlines() if line.startswith("step") or "wrong" in line]
    assert any("wrong" in line for line in marked)
    assert "bf16" in result.stdout
