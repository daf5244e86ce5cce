"""The native functions through ctypes, on whatever shapes, dtypes and addresses, against float64 in PyTorch.

Every tensor lies inside of a larger one full of NaN, at an odd place and with gaps between its rows: what is read there
shows in the results, and what is written there shows afterwards.
"""

from collections.abc import Callable, Iterator
from ctypes import Structure
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from surrounded import Memory, assert_close, offsets_of, products, weights
from torch import Tensor

import kpt_core
from kpt_backend_cpu import BACKEND, KPT_CPU_ISA, native
from kpt_backend_cpu.structures import (
    ACTIVATIONS,
    GATED,
    SCORES,
    ActivationSettings,
    Experts,
    ExpertsBackward,
    GroupedMM,
    GroupedMMWgrad,
    Matrices,
    Sort,
    TopKGating,
    TopKGatingBackward,
)
from kpt_backend_cpu.tensors import matrices, rows
from kpt_moe.experts import experts

Run = Callable[[str, Structure], None]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)
POOLS = ("OpenMP", "own threads")

SIZES = st.one_of(st.integers(1, 20), st.integers(1, 300), st.sampled_from((63, 64, 65, 127, 128, 129, 256, 257)))
ROWS = st.one_of(st.integers(0, 6), st.integers(0, 120))
SEEDS = st.integers(0, 2**32)
THREADS = st.integers(1, 4)

fuzz = settings(max_examples=25, deadline=None)


def numbers_of(made: Structure) -> Iterator[float]:
    """All numbers of a structure, those of structures in it in their place."""
    for name, *_ in made._fields_:
        value = getattr(made, name)
        if isinstance(value, Structure):
            yield from numbers_of(value)
        else:
            yield value or 0


@pytest.fixture(scope="module", params=[f"{name}, {pool}" for name in native.INSTRUCTION_SETS for pool in POOLS])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """How a kernel is called, in the library of one instruction set."""
    reason = BACKEND.unavailable()
    if reason is not None:
        pytest.skip(reason)
    name, pool = request.param.split(", ")
    if name not in native.library().there:
        pytest.skip(f"this machine has no {name}, or there is no library for it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KPT_CPU_ISA, name)
        patch.setattr(native, "_library", None)
        library = native.library()
        assert library.instruction_set == name
        openmp = native._openmp_of_torch()
        library.functions.kpt_cpu_use_openmp(*(openmp if pool == "OpenMP" else (None,) * 2))
        yield lambda kernel, made: native.run(kernel, *numbers_of(made))
        library.functions.kpt_cpu_use_openmp(*openmp)


@fuzz
@given(
    dtype=st.sampled_from(FLOATS + SMALL),
    small=st.sampled_from((None, *SMALL)),
    scale=st.sampled_from(("none", "n", "k", "block")),
    x_scale=st.sampled_from(("none", "row", "block")),
    shape=st.tuples(ROWS, SIZES, SIZES, st.integers(1, 6)),
    n_contiguous=st.booleans(),
    threads=THREADS,
    seed=SEEDS,
)
def test_grouped_products_are_those_of_float64(
    run: Run,
    dtype: torch.dtype,
    small: torch.dtype | None,
    scale: str,
    x_scale: str,
    shape: tuple[int, int, int, int],
    n_contiguous: bool,
    threads: int,
    seed: int,
) -> None:
    memory, (count, inner, columns, experts) = Memory(seed), shape
    weight_dtype = small or (dtype if dtype in FLOATS else SMALL[0])
    scale = scale if weight_dtype in SMALL else "none"
    x = memory.place(memory.uniform(count, inner).to(dtype))
    weight, factor, exact = weights(memory, weight_dtype, experts, inner, columns, scale, n_contiguous=n_contiguous)
    offsets = offsets_of(memory, count, experts)
    of_x, exact_x = None, x.double()
    if dtype in SMALL and x_scale != "none":
        blocks = 1 if x_scale == "row" else -(-inner // 128)
        of_x = memory.place(memory.uniform(count, blocks).abs() + 0.5, gaps=False)
        exact_x = exact_x * of_x.double().repeat_interleave(128 if x_scale == "block" else inner, 1)[:, :inner]
    out = memory.empty(FLOATS[memory.number(2)] if weight_dtype in SMALL else dtype, count, columns)
    place = (None, 0) if of_x is None else (of_x.data_ptr(), of_x.shape[1])
    sizes = (count, inner, columns, experts, threads)
    run("kpt_grouped_mm", GroupedMM(rows(x), rows(out), matrices(weight, factor), *place, offsets.data_ptr(), *sizes))
    assert_close("out", out, products(exact_x, exact, offsets))
    assert memory.is_whole()


@fuzz
@given(
    dtype=st.sampled_from(FLOATS), shape=st.tuples(ROWS, SIZES, SIZES, st.integers(1, 6)), threads=THREADS, seed=SEEDS
)
def test_gradients_of_matrices_are_those_of_float64(
    run: Run, dtype: torch.dtype, shape: tuple[int, int, int, int], threads: int, seed: int
) -> None:
    memory, (count, inner, columns, experts) = Memory(seed), shape
    x, grad = (memory.place(memory.uniform(count, size).to(dtype)) for size in (inner, columns))
    offsets = offsets_of(memory, count, experts)
    out = memory.empty(dtype, experts, inner, columns, gaps=False)
    sizes = (count, inner, columns, experts, threads)
    run("kpt_grouped_mm_wgrad", GroupedMMWgrad(rows(x), rows(grad), out.data_ptr(), offsets.data_ptr(), *sizes))
    ends = offsets.tolist()
    parts = [x[a:b].double().T @ grad[a:b].double() for a, b in zip([0, *ends], ends, strict=False)]
    assert_close("out", out, torch.stack(parts))
    assert memory.is_whole()


@fuzz
@given(
    pairs=st.integers(0, 200), experts=st.integers(1, 40), dtype=st.sampled_from((torch.int64, torch.int32)), seed=SEEDS
)
def test_sorting_is_stable_and_ids_of_no_expert_come_last(
    run: Run, pairs: int, experts: int, dtype: torch.dtype, seed: int
) -> None:
    memory = Memory(seed)
    ids = torch.randint(-3, experts + 3, (1, pairs), generator=memory.random)
    ids[torch.rand(1, pairs, generator=memory.random) < 0.1] = torch.iinfo(dtype).min
    index = memory.place(ids.to(dtype), gaps=False)
    order = memory.place(torch.zeros(1, pairs, dtype=torch.int32), gaps=False)
    offsets = memory.place(torch.zeros(1, experts, dtype=torch.int32), gaps=False)
    places = index.data_ptr(), int(dtype is torch.int64), order.data_ptr(), offsets.data_ptr()
    run("kpt_sort", Sort(*places, pairs, experts))
    known = torch.where((ids >= 0) & (ids < experts), ids, experts)[0]
    assert order[0].tolist() == known.argsort(stable=True).tolist()
    assert offsets[0].tolist() == known.bincount(minlength=experts + 1).cumsum(0)[:experts].tolist()
    assert memory.is_whole()


@dataclass(frozen=True)
class Call:
    """A call of `moe.experts`."""

    dtype: torch.dtype
    weight_dtype: torch.dtype | None
    scale: str
    activation: str
    interleaved: bool
    limit: float | None
    tokens: int
    top_k: int
    experts: int
    hidden: int
    intermediate: int
    transposed: bool
    bias: bool
    ids: torch.dtype
    threads: int
    seed: int


CALLS = st.builds(
    Call,
    dtype=st.sampled_from(FLOATS),
    weight_dtype=st.sampled_from((None, None, *SMALL)),
    scale=st.sampled_from(("n", "block")),
    activation=st.sampled_from(tuple(ACTIVATIONS)),
    interleaved=st.booleans(),
    limit=st.sampled_from((None, 0.75)),
    tokens=st.integers(0, 40),
    top_k=st.integers(1, 8),
    experts=st.integers(1, 9),
    hidden=SIZES,
    intermediate=SIZES,
    transposed=st.booleans(),
    bias=st.booleans(),
    ids=st.sampled_from((torch.int64, torch.int32)),
    threads=THREADS,
    seed=SEEDS,
)


@fuzz
@given(call=CALLS)
def test_experts_and_their_gradients_are_those_of_the_reference_in_float64(run: Run, call: Call) -> None:
    memory, gated = Memory(call.seed), call.activation in GATED
    swiglu = call.activation == "swiglu" and call.limit is not None
    alpha, beta, limit = (1.702, 1.0, call.limit) if swiglu else (1.0, 0.0, None)
    tokens, hidden, intermediate = call.tokens, call.hidden, call.intermediate
    width, pairs, interleaved = intermediate * (2 if gated else 1), tokens * call.top_k, call.interleaved and gated
    frozen, scale = call.weight_dtype is not None, call.scale if call.weight_dtype else "none"
    x = memory.place(memory.uniform(tokens, hidden).to(call.dtype))
    ids = torch.randint(-1, call.experts + 1, (tokens, call.top_k), generator=memory.random)
    index = memory.place(ids.to(call.ids), gaps=False)
    routing = memory.place(memory.uniform(tokens, call.top_k).to(call.dtype), gaps=False)
    dtype, order = call.weight_dtype or call.dtype, {"n_contiguous": call.transposed}
    up, up_scale, exact_up = weights(memory, dtype, call.experts, hidden, width, scale, **order)
    down, down_scale, exact_down = weights(memory, dtype, call.experts, intermediate, hidden, scale, **order)
    biases = [memory.place(memory.uniform(call.experts, size).to(call.dtype) / 2) for size in (width, hidden)]
    if not call.bias:
        biases = []
    grad = memory.place(memory.uniform(tokens, hidden).to(call.dtype))

    exact = [t.double().requires_grad_() for t in (x, routing, exact_up, exact_down, *biases)]
    exact_x, exact_routing, *exact_rest = exact
    with kpt_core.use("reference"):
        want = experts(
            exact_x,
            ids,
            exact_routing,
            *exact_rest,
            activation=call.activation,
            transposed=True,
            interleaved=interleaved,
            alpha=alpha,
            beta=beta,
            limit=limit,
        )
    wanted_grads = torch.autograd.grad(want, exact, grad.double(), materialize_grads=True)

    known = torch.where((ids >= 0) & (ids < call.experts), ids, call.experts).flatten()
    sorted_pairs = known.argsort(stable=True).int()
    offsets = known.bincount(minlength=call.experts + 1).cumsum(0)[: call.experts].int()
    out, decoded, h = (
        memory.empty(call.dtype, *shape) for shape in ((tokens, hidden), (tokens, hidden), (pairs, width))
    )
    settings_of_act = ActivationSettings(
        ACTIVATIONS[call.activation], interleaved, limit is not None, alpha, beta, limit or 0.0
    )
    sizes = (tokens, call.top_k, call.experts, hidden, width, intermediate, call.threads)
    bias_rows = [rows(bias) for bias in biases] or [rows(None)] * 2

    def arguments(result: Tensor, kept: Tensor | None, *, sort: bool = True) -> Experts:
        return Experts(
            rows(x),
            rows(result),
            index.data_ptr(),
            call.ids is torch.int64,
            rows(routing),
            matrices(up, up_scale),
            matrices(down, down_scale),
            *bias_rows,
            settings_of_act,
            sorted_pairs.data_ptr() if sort else None,
            offsets.data_ptr() if sort else None,
            rows(kept),
            *sizes,
        )

    run("kpt_experts_forward", arguments(out, h))
    run("kpt_experts_decode", arguments(decoded, None, sort=False))
    assert_close("out", out, want.detach())
    assert_close("decoded", decoded, want.detach())
    results = [
        memory.empty(call.dtype, tokens, hidden),
        memory.empty(call.dtype, tokens, call.top_k, gaps=False),
        memory.empty(call.dtype, *(up if call.transposed else up.mT).shape),
        memory.empty(call.dtype, *(down if call.transposed else down.mT).shape),
        *(memory.empty(call.dtype, *bias.shape) for bias in biases),
    ]
    of_x, of_routing, of_up, of_down, *of_biases = results
    if not call.transposed:
        of_up, of_down = of_up.mT, of_down.mT
    run(
        "kpt_experts_backward",
        ExpertsBackward(
            arguments(out, h),
            rows(grad),
            rows(of_x),
            rows(of_routing),
            Matrices() if frozen else matrices(of_up),
            Matrices() if frozen else matrices(of_down),
            *([rows(each) for each in of_biases] or [rows(None)] * 2),
        ),
    )
    names = ("x", "top_k_weights", "up", "down", "up_bias", "down_bias")
    for name, got, right in zip(names, (of_x, of_routing, of_up, of_down, *of_biases), wanted_grads, strict=False):
        # Rounded, a pre-activation may lie on the other side of a bound, where the derivative is another one.
        steps = call.dtype is not torch.float32 and (limit is not None or call.activation in ("relu", "reglu"))
        if not steps and not (frozen and name in ("up", "down")):
            assert_close(f"grad of {name}", got, right, 2.0)
    assert memory.is_whole()


@fuzz
@given(
    dtype=st.sampled_from(FLOATS),
    score=st.sampled_from(tuple(SCORES)),
    tokens=st.integers(0, 30),
    experts=st.tuples(st.integers(1, 40), st.integers(1, 6)),
    top_groups=st.integers(1, 6),
    top_k=st.integers(1, 12),
    renormalize=st.booleans(),
    bias=st.booleans(),
    scale=st.sampled_from((1.0, 2.5)),
    threads=THREADS,
    seed=SEEDS,
)
def test_gating_and_its_gradient_are_those_of_float64(
    run: Run,
    dtype: torch.dtype,
    score: str,
    tokens: int,
    experts: tuple[int, int],
    top_groups: int,
    top_k: int,
    renormalize: bool,
    bias: bool,
    scale: float,
    threads: int,
    seed: int,
) -> None:
    memory, (of_group, groups) = Memory(seed), experts
    top_groups = min(top_groups, groups)
    top_k, count = min(top_k, of_group * top_groups), of_group * groups
    # On a grid, far from each other, so that float32 chooses as float64 does.
    ranks = torch.rand(tokens, count, generator=memory.random).argsort(1)
    logits = memory.place((ranks.float() / 32 - count / 64).to(dtype))
    correction = memory.place(memory.uniform(1, count) / 4096, gaps=False) if bias else None
    grads = memory.place(memory.uniform(tokens, top_k), gaps=False)
    got = memory.empty(torch.float32, tokens, top_k, gaps=False)
    index = memory.place(torch.zeros(tokens, top_k, dtype=torch.int64), gaps=False)
    grad_logits = memory.empty(dtype, tokens, count)
    call = TopKGating(
        rows(logits),
        None if correction is None else correction.data_ptr(),
        got.data_ptr(),
        index.data_ptr(),
        *(tokens, count, top_k, groups, top_groups, SCORES[score], renormalize, scale, threads),
    )
    run("kpt_top_k_gating", call)
    run("kpt_top_k_gating_backward", TopKGatingBackward(call, grads.data_ptr(), rows(grad_logits)))

    exact = logits.double().requires_grad_()
    scores = exact.softmax(1) if score == "softmax" else exact.sigmoid() if score == "sigmoid" else exact
    keys = scores.detach() + (0 if correction is None else correction.double())
    if top_groups < groups:
        best = keys.unflatten(1, (groups, of_group)).topk(min(2 if bias else 1, of_group), 2).values.sum(2)
        left_out = best.argsort(1)[:, : groups - top_groups].unsqueeze(2)
        keys = (
            keys.unflatten(1, (groups, of_group)).scatter(1, left_out.expand(-1, -1, of_group), -torch.inf).flatten(1)
        )
    # Each choice is the best that there was, to float32's rounding.
    chosen = keys.gather(1, index)
    assert all(len(set(line)) == top_k for line in index.tolist())
    if tokens:
        assert (chosen - keys.topk(top_k, 1).values).abs().max() < 1e-5
    right = scores.gather(1, index)
    if score == "softmax_after":
        right = right.softmax(1)
    if renormalize:
        right = right / (right.sum(1, keepdim=True) + 1e-20)
    right = right * scale
    assert_close("weights", got, right.detach())
    (right_grad,) = torch.autograd.grad(right, exact, grads.double())
    assert_close("grad_logits", grad_logits, right_grad)
    assert memory.is_whole()
