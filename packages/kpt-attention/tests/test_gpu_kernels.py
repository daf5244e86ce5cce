"""PyTorch's fused kernels behind `attention.dense` on GPUs: numbers of the same functions on a CPU, and refusals."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kpt_core
from kpt_attention.cases import DENSE
from kpt_attention.cases.paged import PAGED, UPDATE_CACHE
from kpt_attention.dense import dense
from kpt_attention.paged import paged, update_cache
from kpt_attention.plan import allowed_keys
from kpt_attention.torch_kernels import gpu_flex, gpu_paged, gpu_sdpa
from kpt_core import Call
from kpt_optimize.cases import Case

SMALL = {case.name: case for case in DENSE.cases if not (case.model or case.large)}
#: One of each kind of mask, of what changes scores, and of places.
OF_FLEX = (
    *("full", "decode past many keys, left padding", "causal from the start", "more queries than keys", "documents"),
    *("two intervals", "blocks", "blocks by head", "nothing seen", "nothing seen but the sink", "softcap and a bias"),
    *(
        "dropout",
        "dropout of a drawn seed",
        "bias of keys",
        "alibi",
        "relative bias",
        "sinks",
        "groups of heads, output alone",
        "scaled",
    ),
)


#: Dynamo looks at the gradients of what is no leaf.
eagerly = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:The .grad attribute of a Tensor that is not a leaf"
)


@pytest.fixture(autouse=True)
def _backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function itself differentiates on any device; torch refuses on CPUs, where its compiler has no kernel."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)


def call_of(case: str, **changes: Any) -> Call:
    """A case's call in float64, so that no rounding hides a fault."""
    made = DENSE.arguments(SMALL[case], dtype=torch.float64)
    return dense.bind(**{**made, **changes})


def on_a_gpu(call: Call) -> Call:
    """A call of a dtype and of sizes that GPUs' kernels take."""
    wide = {name: getattr(call, name).bfloat16() for name in ("q", "k", "v")}
    return call._replace(**{name: tensor.repeat(1, 1, 1, 4) for name, tensor in wide.items()})


def results(call: Call, function: Callable[[Call], Any]) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients for random cotangents."""
    leaves = {
        name: value.detach().clone().requires_grad_()
        for name, value in call._asdict().items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    out, lse = function(call._replace(**leaves))
    generator = torch.Generator().manual_seed(0)
    told = {"out": out} | ({} if lse is None else {"lse": lse.masked_fill(lse == -math.inf, 0)})
    loss = torch.stack([(each * torch.randn(each.shape, generator=generator).double()).sum() for each in told.values()])
    gradients = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
    found = {f"gradient of {name}": grad for name, grad in zip(leaves, gradients, strict=True) if grad is not None}
    return {name: each.detach() for name, each in (told | found).items()}


def by_flex(call: Call) -> Any:
    out, lse = gpu_flex.attend(call, gpu_flex.lists_of(call), flex.flex_attention, gpu_flex.begin_of(call))
    return out, lse if call.return_lse else None


def assert_equals_reference(call: Call, function: Callable[[Call], Any]) -> None:
    got, want = results(call, function), results(call, dense.run_reference)
    for name, tensor in want.items():
        torch.testing.assert_close(
            got[name], tensor, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


@eagerly
@pytest.mark.parametrize("case", OF_FLEX)
def test_flex_gives_the_references_numbers_and_gradients(case: str) -> None:
    call = call_of(case)
    assert gpu_flex.unsupported(on_a_gpu(call)) is None
    assert_equals_reference(call, by_flex)


@eagerly
@pytest.mark.parametrize("case", ["sinks", "nothing seen", "softcap and a bias", "documents", "blocks by head"])
def test_dropout_goes_with_all_else(case: str) -> None:
    assert_equals_reference(call_of(case, dropout=0.6, seed=2**61 + 5, offset=7), by_flex)


@eagerly
@pytest.mark.parametrize("case", ["decode past many keys, left padding", "blocks by head", "causal from the start"])
def test_nothing_of_what_nobody_sees_stays(case: str) -> None:
    call = call_of(case)
    if call.block_bits is not None:  # of each block the first 16 keys
        call.block_bits[..., 2:] = 0
    hidden = gpu_flex._unseen(call)
    assert hidden is not None
    assert hidden.any()
    spoilt = call._replace(**{n: getattr(call, n).masked_fill(hidden, math.nan) for n in ("k", "v")})
    with torch.no_grad():
        torch.testing.assert_close(by_flex(spoilt)[0], dense.run_reference(call)[0], rtol=1e-9, atol=1e-9)


def test_one_program_serves_all_lengths_forward_and_backward() -> None:
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length in (40, 200, 300, 513):
        made = DENSE.arguments(
            Case(name="window", sizes={"queries": length, "keys": length, "mask": "window", "batch": 1, "groups": 2}),
            dtype=torch.float64,
        )
        call = dense.bind(**made)
        assert_equals_reference(call, gpu_flex._compiled(gpu_flex._kind(call), "eager"))
    # Lists and attention are two programs, and one block of keys is a size of its own.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 4


def test_layers_that_share_a_plan_look_for_its_blocks_once() -> None:
    found: list[Call] = []

    def find(call: Call) -> gpu_flex.Lists | None:
        found.append(call)
        return gpu_flex.lists_of(call)

    call, other = call_of("window"), call_of("blocks")
    first = gpu_flex._once(call, find)
    assert gpu_flex._once(call._replace(q=call.q.clone(), v=call.v.clone()), find) is first
    assert len(found) == 1
    gpu_flex._once(call._replace(q=call.q[:, :, :-1], position=1), find)  # other sizes
    gpu_flex._once(call._replace(position=call.position + 1), find)
    gpu_flex._once(other, find)
    gpu_flex._once(other._replace(block_bits=other.block_bits.clone()), find)
    assert len(found) == 5
    call.intervals[..., 0] = 0  # what was written to is another plan
    again = gpu_flex._once(call, find)
    assert len(found) == 6
    assert first is not None
    assert again is not None
    assert not all(map(torch.equal, first[0], again[0]))
    with torch.inference_mode():  # of which torch keeps no account
        told = call._replace(intervals=call.intervals.clone())
        gpu_flex._once(told, find), gpu_flex._once(told, find)
    assert len(found) == 8


@pytest.mark.parametrize(
    "mask", ["causal", "window", "documents", "padding", "two intervals", "blocks", "blocks by head"]
)
@pytest.mark.parametrize(("queries", "keys"), [(384, 384), (256, 640)])
def test_the_blocks_that_are_visited_are_those_that_torch_finds(mask: str, queries: int, keys: int) -> None:
    sizes = {"queries": queries, "keys": keys, "batch": 2, "kv_heads": 1, "groups": 3, "mask": mask}
    call = dense.bind(**DENSE.arguments(Case(name="", sizes=sizes), dtype=torch.float32))
    plan = gpu_flex._plan(call)
    seen = allowed_keys(plan, range(queries), range(keys), torch.device("cpu")).expand(2, 3, queries, keys)
    theirs = flex.create_block_mask(lambda b, h, q, k: seen[b, h, q, k], 2, 3, queries, keys, device="cpu")
    ours = gpu_flex.lists_of(call)
    assert ours is not None
    names = [f"{full}{of}" for of in ("kv", "q") for full in ("", "full_")]
    for name, counts, indices in zip(names, ours[0][::2], ours[0][1::2], strict=True):
        wanted, places = (getattr(theirs, f"{name}_{of}") for of in ("num_blocks", "indices"))
        torch.testing.assert_close(counts.expand_as(wanted), wanted)
        own = indices.expand_as(places)
        for line in itertools.product(*map(range, wanted.shape)):
            assert own[line][: wanted[line]].tolist() == places[line][: wanted[line]].tolist()


class Launches(TorchDispatchMode):
    """Counts what a device would be asked to do: operations that give new storage, or write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given]
        if (made and "empty" not in func.__name__) or func._schema.is_mutable:
            self.names.append(func.__name__)
        return out


def one_launch(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Take the place of FlexAttention's one program."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True), q[..., 0].float()


@pytest.mark.parametrize("mask", ["causal", "none", "window", "documents", "blocks"])
@pytest.mark.parametrize("training", [False, True])
def test_a_layer_of_1024_tokens_is_at_most_twelve_launches(mask: str, training: bool) -> None:
    sizes = {"queries": 1024, "keys": 1024, "batch": 1, "kv_heads": 2, "groups": 2, "head_dim": 64, "value_dim": 64}
    call = dense.bind(
        **DENSE.arguments(Case(name="", sizes={**sizes, "mask": mask, "return_lse": False}), dtype=torch.bfloat16)
    )
    leaves = {name: getattr(call, name).requires_grad_(training) for name in "qkv"}
    call = call._replace(**leaves)
    plain = mask in ("causal", "none")
    lists = None if plain else gpu_flex.lists_of(call)  # of the plan, once for all layers
    with Launches() as counted:
        out = gpu_sdpa.forward(call)[0] if plain else gpu_flex.attend(call, lists, one_launch)[0]
        if training:
            torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
    assert 1 <= len(counted.names) <= 12, counted.names


@pytest.fixture
def on_this_cpu() -> Iterator[None]:
    """The CPU calls itself a GPU, without its own kernels, and programs are not compiled further than traced."""
    program = gpu_flex._compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kpt_core.contract._GPUS", ("cpu",))
        patch.setattr(gpu_flex, "_compiled", lambda kind: program(kind, "eager"))
        patch.setenv("KPT_DISABLE", "cpu")
        kpt_core.refresh()
        yield
    kpt_core.refresh()


@pytest.mark.usefixtures("on_this_cpu")
@pytest.mark.parametrize(
    ("case", "module", "seen"),
    [
        ("window", "gpu_flex", "attention_dense"),
        ("causal, output alone", "gpu_sdpa", "scaled_dot_product_attention"),
        ("decode, output alone", "gpu_sdpa", "scaled_dot_product_attention"),
    ],
)
def test_they_serve_graphs_of_ones_own(case: str, module: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "saves", pytest.fail)  # which would attend once more, by all scores at once
    made = DENSE.arguments(SMALL[case], dtype=torch.float32)
    tensors = {n: made.pop(n).repeat(1, 1, 1, 4) for n in "qkv"}
    leaves = [tensor.requires_grad_() for tensor in tensors.values()]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(q, k, v, **made)[0]

    torch._dynamo.reset()
    assert module in str(dense.explain(*leaves, **made).kernel)
    found = []
    names: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return aot_eager(graph, inputs)

    for function in (torch.compile(attend, backend=backend, fullgraph=True), attend):
        out = function(*leaves)
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    assert any(seen in name for name in names)
    with kpt_core.use("reference"):
        out = attend(*leaves)
        want = (out.detach(), *torch.autograd.grad(out.square().sum(), leaves))
    for got in found:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_this_cpu")
def test_transforms_are_left_to_others_by_what_is_compiled() -> None:
    call = on_a_gpu(call_of("window"))
    said = []

    def look(q: Tensor) -> Tensor:
        said.append(str(gpu_flex.unsupported(call._replace(q=q))))
        return q.sum()

    torch.func.grad(look)(call.q)
    assert said == ["tensors of torch.func; FlexAttention is compiled, and its compiler takes none"]


TAKEN_BY_SDPA = (
    *("small", "causal, output alone", "decode, output alone", "a few queries of many keys", "bias of keys"),
    *("a few queries of few keys", "groups of heads, output alone", "groups of heads, full, output alone", "scaled"),
    "causal from the start",
)


@pytest.mark.parametrize("case", TAKEN_BY_SDPA)
def test_sdpa_gives_the_references_numbers_and_gradients(case: str) -> None:
    call = call_of(case, return_lse=False)
    taken = on_a_gpu(call)
    taken = taken if taken.bias is None else taken._replace(bias=taken.bias.bfloat16())
    assert gpu_sdpa.unsupported(taken) is None
    assert_equals_reference(call, gpu_sdpa.forward)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("full", "the log-sum-exp is asked for"),
        ("window", "intervals is given"),
        ("blocks", "blocks is given"),
        ("sinks", "intervals is given"),
        ("alibi", "alibi_slopes is given"),
        ("softcap", "the log-sum-exp|no softcap"),
        ("more queries than keys", "the log-sum-exp"),
        ("no keys", "nothing to compute|the log-sum-exp"),
    ],
)
def test_sdpa_says_why_it_takes_a_call_not(case: str, sentence: str) -> None:
    refusal = str(gpu_sdpa.unsupported(on_a_gpu(call_of(case))))
    assert any(each in refusal for each in sentence.split("|")), refusal


def test_sdpa_rounds_no_bias_and_gives_no_row_that_sees_nothing() -> None:
    mixed = on_a_gpu(call_of("bias of keys", return_lse=False))
    assert "a bias in torch.float64" in str(gpu_sdpa.unsupported(mixed))
    beside = on_a_gpu(call_of("softcap and a bias", return_lse=False, softcap=0.0))
    assert "a bias beside causality" in str(gpu_sdpa.unsupported(beside._replace(bias=beside.bias.bfloat16())))
    early = on_a_gpu(call_of("more queries than keys", return_lse=False))
    assert "every query at a key" in str(gpu_sdpa.unsupported(early))


def test_no_small_heads_for_flex() -> None:
    assert "dims 8 and 8" in str(gpu_flex.unsupported(call_of("causal")._replace(q=torch.zeros(2, 2, 24, 8))))


def test_groups_are_repeated_where_the_kernel_knows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    def sdpa(q: Tensor, k: Tensor, v: Tensor, *, enable_gqa: bool, **settings: Any) -> Tensor:
        asked.append((k.shape[1], enable_gqa))
        return torch.zeros_like(q)

    monkeypatch.setattr(gpu_sdpa.F, "scaled_dot_product_attention", sdpa)
    call = on_a_gpu(call_of("groups of heads, full, output alone"))
    gpu_sdpa.forward(call)
    gpu_sdpa.forward(call._replace(**{name: getattr(call, name).float() for name in "qkv"}))
    kv_heads, heads = call.k.shape[1], call.q.shape[1]
    assert asked == [(kv_heads, True), (heads, False)]


STEPS = {case.name: case for case in PAGED.cases if not case.model and case.sizes.get("queries", 1) == 1}


PREFILLS = {case.name: case for case in PAGED.cases if case.sizes.get("queries", 1) > 1}
OVER_PAGES = [
    *(
        pytest.param(case, gpu_paged.unsupported, gpu_paged.forward, id=case.name)
        for case in STEPS.values()
        if case.name not in ("no sequences", "no pages")
    ),
    *(pytest.param(case, gpu_paged.unsupported_prefill, gpu_paged.prefill, id=case.name) for case in PREFILLS.values()),
]


@pytest.mark.parametrize(("case", "unsupported", "kernel"), OVER_PAGES)
def test_kernels_over_pages_give_the_references_numbers(
    case: Case, unsupported: Callable[[Call], Any], kernel: Callable[[Call], Any]
) -> None:
    call = paged.bind(**PAGED.arguments(case, dtype=torch.float64))
    assert unsupported(call) is None
    hidden = PAGED.padding(PAGED.arguments(case, dtype=torch.float64))
    dirty = {name: getattr(call, name) for name in hidden}
    dirty = {n: cache.masked_fill(hidden[n], math.nan) if cache.itemsize > 1 else cache for n, cache in dirty.items()}
    for tried in (call, call._replace(**dirty)):
        for got, want in zip(kernel(tried), paged.run_reference(call), strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_a_step_over_pages_leaves_prefills_and_what_is_too_much_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    several = next(case for case in PAGED.cases if case.name == "several queries")
    assert "several queries" in str(gpu_paged.unsupported(paged.bind(**PAGED.arguments(several))))
    monkeypatch.setattr(gpu_paged, "_MOST_BYTES", 1000)
    assert "GiB at once" in str(gpu_paged.unsupported(paged.bind(**PAGED.arguments(STEPS["a step"]))))
    monkeypatch.setattr(gpu_paged, "_MOST_ADDED", 1000)
    assert "added to scores" in str(gpu_paged.unsupported_prefill(paged.bind(**PAGED.arguments(PREFILLS["a tree"]))))


@pytest.mark.parametrize("case", [case for case in UPDATE_CACHE.cases if not case.model], ids=lambda case: case.name)
@pytest.mark.parametrize("left_out", [0, 3, 1000])
def test_rows_are_written_into_their_slots_and_nowhere_else(case: Case, left_out: int) -> None:
    made = UPDATE_CACHE.arguments(case, dtype=torch.float32)
    made["slots"][:left_out] = -1
    calls = [update_cache.bind(**{n: v.clone() if isinstance(v, Tensor) else v for n, v in made.items()}) for _ in "ab"]
    gpu_paged.update(calls[0])
    update_cache.run_reference(calls[1])
    for name in ("k_cache", "v_cache"):
        got, want = (getattr(call, name) for call in calls)
        bits = torch.uint8 if got.itemsize == 1 else torch.int32
        assert torch.equal(got.view(bits), want.view(bits)), name
