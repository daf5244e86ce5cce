"""What ops launch on a simulated H100, over the numbers of tokens that a server sees.

Tensors have no memory and launches are recorded. Whatever reads a value on the host fails, and so do copies between
host and device, which a CUDA graph cannot hold. Of each launch Triton's own key is made, by which it looks for a
program that is compiled already.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kpt_attention.dense import dense
from kpt_attention.paged import paged, update_cache
from kpt_core.contract import call_type, load
from kpt_triton import chips, launching
from kpt_triton.attention.mask import schedule_kernel
from kpt_triton.numeric import INTERPRETED
from kpt_triton.table import KERNELS

TOKENS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100, 128, 129, 256, 1000, 1024, 4096, 4097)
DEVICE = torch.device("cuda", 0)
BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768


class Launch(NamedTuple):
    """What Triton makes a key of: `chosen` are constexprs and options, `arguments` how others are specialised."""

    kernel: str
    chosen: tuple[tuple[str, Any], ...]
    arguments: tuple[tuple[str, Any], ...]


class OnDeviceAlone(TorchDispatchMode):
    """Let no value reach the host, and none come from it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{func} copies between {' and '.join(sorted(devices))}")
        return out


class WithoutGuard(TorchFunctionMode):
    """Index as torch does, but for its guard of the device, which fails where PyTorch is built without CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        x, index = args
        gathers = [leaf for leaf in tree_leaves(index) if isinstance(leaf, Tensor)]
        if any(each.device != x.device for each in gathers):
            raise RuntimeError("an index is copied to the device")
        twin = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        where = tree_map_only(Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype, device="meta"), index)
        found = func(twin, where)
        if gathers:
            return x.new_empty(found.shape)
        return x.as_strided(found.shape, found.stride(), x.storage_offset() + found.storage_offset())


@cache
def binder(function: Any) -> Callable[..., Any]:
    """Return what makes Triton's key of a launch: its own code, which an interpreted function does not call."""
    jit = function if isinstance(function, JITFunction) else JITFunction(function.fn, **function.kwargs)
    made: Callable[..., Any] = create_function_from_signature(
        jit.signature, jit.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    return made


def launch_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """Return the key of a launch."""
    _, keys, options = binder(function)(*args, **kwargs)
    named = list(zip(function.arg_names, keys, strict=True))
    constants = [(name, key[1]) for name, key in named if key[0] == "constexpr" and name in kwargs]
    return Launch(
        function.__name__,
        (*constants, *sorted(options.items())),
        tuple((name, key) for name, key in named if name not in kwargs),
    )


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Simulate an H100, and give the launches that are made on it."""
    found: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(launch_of(self, args, kwargs))

    def waits(*args: object) -> None:
        raise RuntimeError("torch.cuda.synchronize waits for the device")

    def address(tensor: Tensor) -> int:
        return (
            4096 + int(tensor.storage_offset()) * tensor.element_size()
        )  # of memory that begins at a multiple of 16 bytes

    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", waits)
    monkeypatch.setattr(Tensor, "data_ptr", address)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(INTERPRETED, "value", False)
    for kind in {JITFunction, type(schedule_kernel)}:
        monkeypatch.setattr(kind, "run", run)
    remembered = (chips.chip_of, launching._processors)
    for function in remembered:
        function.cache_clear()
    yield found
    for function in remembered:
        function.cache_clear()


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def record(**given: Any) -> Any:
    """Return the record of a call, as the core makes them."""
    fields = given | {"needs": (), "config": None}
    return call_type("test.simulated", tuple(given))(*fields.values())


def experts(tokens: int, **more: Any) -> Any:
    given = {
        "x": empty(tokens, HIDDEN), "top_k_index": empty(tokens, TOP_K, dtype=torch.int64),
        "top_k_weights": empty(tokens, TOP_K, dtype=FP32), "gate_up_proj": empty(EXPERTS, 2 * INNER, HIDDEN),
        "down_proj": empty(EXPERTS, HIDDEN, INNER), "gate_up_proj_bias": empty(EXPERTS, 2 * INNER),
        "down_proj_bias": empty(EXPERTS, HIDDEN), "activation": "swiglu", "transposed": False, "interleaved": False,
        "alpha": 1.0, "beta": 0.0, "limit": None, "gate_up_scale": None, "down_scale": None,
        "activations": "none",
    }  # fmt: skip
    return record(**given | more)


def experts_in_8_bits(tokens: int, **more: Any) -> Any:
    return experts(
        tokens, **more, gate_up_proj=empty(EXPERTS, 2 * INNER, HIDDEN, dtype=E4M3),
        down_proj=empty(EXPERTS, HIDDEN, INNER, dtype=E4M3),
        gate_up_scale=empty(EXPERTS, 2 * INNER // 128, HIDDEN // 128, dtype=FP32),
        down_scale=empty(EXPERTS, HIDDEN // 128, INNER // 128, dtype=FP32),
    )  # fmt: skip


def scaled_grouped_mm(rows: int, *, codes: bool) -> Any:
    return record(
        x=empty(rows, HIDDEN, dtype=E4M3 if codes else BF16), weight=empty(EXPERTS, HIDDEN, INNER, dtype=E4M3),
        scale=empty(EXPERTS, HIDDEN // 128, INNER // 128, dtype=FP32), offsets=empty(EXPERTS, dtype=torch.int32),
        x_scale=empty(rows, HIDDEN // 128, dtype=FP32) if codes else None, out_dtype=BF16,
    )  # fmt: skip


def quantize(tokens: int, by: str) -> Any:
    return record(
        x=empty(tokens, HIDDEN), scale=None, dtype=E4M3, granularity=by, scale_dtype=FP32, scale_rounding="none",
        stochastic=False,
    )  # fmt: skip


def linear(rows: int, by: str) -> Any:
    scale = empty(INNER // 128, HIDDEN // 128, dtype=FP32) if by == "128x128" else empty(INNER, dtype=FP32)
    return record(
        x=empty(rows, HIDDEN), weight=empty(INNER, HIDDEN, dtype=E4M3), scale=scale, bias=empty(INNER),
        activations="none", granularity=by,
    )  # fmt: skip


def scaled_mm(rows: int, by: str) -> Any:
    if by == "row":
        scales, by_b = (empty(rows, dtype=FP32), empty(INNER, dtype=FP32)), "row"
    else:
        scales, by_b = (
            (empty(rows, HIDDEN // 128, dtype=FP32), empty(HIDDEN // 128, INNER // 128, dtype=FP32)),
            "128x128",
        )
    return record(
        a=empty(rows, HIDDEN, dtype=E4M3), b=empty(INNER, HIDDEN, dtype=E4M3).t(), scale_a=scales[0],
        scale_b=scales[1], granularity_a=by, granularity_b=by_b, out_dtype=BF16, bias=empty(INNER),
    )  # fmt: skip


def attention(tokens: int, **more: Any) -> Any:
    heads = {"q": empty(2, 32, tokens, 128), **{name: empty(2, 8, tokens, 128) for name in "kv"}}
    return dense.bind(**heads, causal=True, sinks=empty(32), return_lse=True, **more)


def masked_attention(tokens: int) -> Any:
    blocks = -(-tokens // 128)
    return attention(
        tokens, intervals=empty(2, 32, tokens, 1, 2, dtype=torch.int32),
        blocks=empty(2, 32, blocks, blocks, dtype=torch.int32), block_bits=empty(3, 128, 16, dtype=torch.uint8),
    )  # fmt: skip


def decoding(tokens: int, keys: int = 4096, **more: Any) -> Any:
    caches = {name: empty(999, 16, 8, 128) for name in ("k_cache", "v_cache")}
    table, lengths = empty(tokens, -(-keys // 16), dtype=torch.int32), empty(tokens, dtype=torch.int32)
    return paged.bind(empty(tokens, 32, 128), **caches, block_table=table, lengths=lengths, return_lse=True, **more)


def update(tokens: int) -> Any:
    caches, rows = (empty(999, 16, 8, 128) for _ in range(2)), (empty(tokens, 8, 128) for _ in range(2))
    return update_cache.bind(*caches, *rows, empty(tokens, dtype=torch.int64))


class Case(NamedTuple):
    """An op's call for a number of tokens, of which arguments the gradients are wanted, and what stays specialised."""

    call: Callable[[int], Any]
    needs: tuple[str, ...] = ()
    specialised: tuple[str, ...] = ()


_OF_PRODUCTS = ("x", "weight")
_OF_EXPERTS = ("x", "top_k_weights", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
_OF_ATTENTION = ("q", "k", "v", "sinks")
_MERGED = ("out", "lse", "other_out", "other_lse")
#: By op; what several cases of one are for stands behind a comma.
CASES = {
    "moe.experts": Case(experts),
    "moe.experts, trained": Case(experts, _OF_EXPERTS),
    "moe.experts, weights of 8 bits": Case(experts_in_8_bits),
    "moe.experts, activations of 8 bits": Case(lambda tokens: experts_in_8_bits(tokens, activations="1x128")),
    "moe.experts, rows of activations of 8 bits": Case(lambda tokens: experts_in_8_bits(tokens, activations="row")),
    "moe.grouped_mm": Case(
        lambda rows: record(
            x=empty(rows, HIDDEN), weight=empty(EXPERTS, HIDDEN, INNER), offsets=empty(EXPERTS, dtype=torch.int32)
        ),
        _OF_PRODUCTS,
    ),
    "moe.grouped_mm_wgrad": Case(
        lambda rows: record(
            x=empty(rows, HIDDEN), grad=empty(rows, INNER), offsets=empty(EXPERTS, dtype=torch.int32)
        ),
        ("x", "grad"),
    ),
    "moe.scaled_grouped_mm": Case(lambda rows: scaled_grouped_mm(rows, codes=False), ("x",)),
    "moe.scaled_grouped_mm, two of 8 bits": Case(lambda rows: scaled_grouped_mm(rows, codes=True)),
    "moe.top_k_gating": Case(
        lambda tokens: record(
            logits=empty(tokens, EXPERTS), correction_bias=None, top_k=TOP_K, score="softmax", renormalize=True,
            scale=1.0, num_groups=1, top_groups=1,
        ),
        ("logits",),
    ),
    **{f"fp8.quantize, {by}": Case(partial(quantize, by=by)) for by in ("tensor", "row", "128x128")},
    "fp8.linear": Case(lambda rows: linear(rows, "row"), ("x", "bias")),
    "fp8.linear, blocks": Case(lambda rows: linear(rows, "128x128"), ("x", "bias")),
    "fp8.scaled_mm": Case(lambda rows: scaled_mm(rows, "row")),
    "fp8.scaled_mm, blocks": Case(lambda rows: scaled_mm(rows, "1x128")),
    "attention.dense": Case(attention, _OF_ATTENTION),
    "attention.dense, a plan": Case(masked_attention, _OF_ATTENTION),
    # Rows of a bias are as long as there are keys, and read in vectors where that is a multiple of 16.
    "attention.dense, a bias": Case(
        lambda tokens: attention(tokens, bias=empty(2, 32, tokens, tokens)),
        _OF_ATTENTION,
        ("stride_bb", "stride_bh", "stride_bm"),
    ),
    "attention.merge": Case(
        lambda tokens: record(
            **{f"{name}out": empty(1, tokens, 31, 128) for name in ("", "other_")},
            **{f"{name}lse": empty(1, tokens, 31, dtype=FP32) for name in ("", "other_")},
        ),
        _MERGED,
    ),
    "attention.paged": Case(decoding),
    "attention.paged, keys": Case(
        lambda keys: decoding(4, keys, bias=empty(32, 4, keys), mask=empty(4, keys, dtype=torch.bool))
    ),
    "attention.update_cache": Case(update),
}  # fmt: skip
_ROWS = {row["op"]: row for row in KERNELS}


def serve(op: str, case: Case, tokens: int) -> bool:
    """Call an op's kernel and, where gradients are wanted, its backward; return whether the kernel takes the call."""
    row = _ROWS[op]
    with ExitStack() as modes:
        modes.enter_context(FakeTensorMode())
        call = case.call(tokens)
        modes.enter_context(OnDeviceAlone())  # type: ignore[no-untyped-call]
        modes.enter_context(WithoutGuard())
        if row.get("unsupported") and load(row["unsupported"])(call) is not None:
            return False
        call = call._replace(needs=case.needs)
        found = load(row["forward"])(call)
        if not case.needs:
            return True
        saves = op in ("moe.experts", "attention.dense")
        results, saved = found if saves else (found, found if op == "moe.top_k_gating" else ())
        results = results if isinstance(results, tuple) else (results,)
        grads = [torch.empty_like(each) if each.is_floating_point() else None for each in results]
        assert load(row["backward"])(call, saved, *grads).keys() == set(case.needs)
        return True


def programs(launches: Iterable[Launch]) -> Iterator[tuple[str, Launch]]:
    """Yield a call's launches by kernel and place among its own: a product's backward has another layout, say."""
    seen: Counter[str] = Counter()
    for launch in launches:
        seen[launch.kernel] += 1
        yield f"{launch.kernel} {seen[launch.kernel]}", launch


def test_each_op_has_a_case() -> None:
    assert {name.partition(",")[0] for name in CASES} == _ROWS.keys()


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_tokens_is_served_by_one_program_for_a_tile_and_nothing_is_read(
    name: str, launches: list[Launch]
) -> None:
    op, taken = name.partition(",")[0], 0
    found: dict[tuple[str, Any], dict[str, set[Any]]] = {}
    for tokens in TOKENS:
        launches.clear()
        try:
            taken += serve(op, CASES[name], tokens)
        except Exception as error:
            raise AssertionError(f"{op} cannot be captured in a CUDA graph: {type(error).__name__}: {error}") from error
        for kernel, launch in programs(launches):
            arguments = found.setdefault((kernel, launch.chosen), {})
            for argument, key in launch.arguments:
                arguments.setdefault(argument, set()).add(key)
    assert taken > 5
    assert found
    specialised = {
        f"{kernel}: {argument}": keys
        for (kernel, _), arguments in found.items()
        for argument, keys in arguments.items()
        if len(keys) > 1 and argument not in CASES[name].specialised
    }
    assert not specialised, f"Triton compiles {name} again for other numbers of tokens: {specialised}"
