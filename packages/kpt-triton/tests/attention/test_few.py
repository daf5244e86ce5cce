"""Few queries, whose keys are split over programs, beside the op's reference in float64; and faults planted there."""

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_dense import _bits
from test_dense_faults import planted
from torch import Tensor

from kpt_attention.dense import dense
from kpt_triton.attention import dense as whole
from kpt_triton.attention import few as kernel
from kpt_triton.numeric import INTERPRETED

_BATCH, _KV_HEADS = 2, 2
_PARTS = (1, 3, 7)


def arguments(
    queries: int, keys: int, groups: int, dims: tuple[int, int] = (8, 8), dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    return {
        "q": torch.randn(_BATCH, _KV_HEADS * groups, queries, dims[0]).to(dtype),
        "k": torch.randn(_BATCH, _KV_HEADS, keys, dims[0]).to(dtype),
        "v": torch.randn(_BATCH, _KV_HEADS, keys, dims[1]).to(dtype),
    }


def _window(queries: int, keys: int, size: int) -> Tensor:
    """Return intervals: each query sees itself and the keys before it, `size` of them."""
    end = torch.arange(queries) + keys - queries + 1
    return torch.stack(((end - size).clamp(min=0), end.clamp(min=0)), -1)[None, None, :, None].int()


def _dead(queries: int, keys: int) -> Tensor:
    """Return intervals of all keys for every other query, from the second one on, and of none for the rest."""
    return (torch.tensor([0, keys]) * (torch.arange(queries) % 2)[:, None])[None, None, :, None].int()


#: What hides keys or changes scores, for so many queries, keys and heads.
_OPTIONS: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "nothing": lambda q, k, h: {},
    "causal": lambda q, k, h: {"causal": True, "position": k - q},
    "causal from the first key": lambda q, k, h: {"causal": True},
    "causal before the first key": lambda q, k, h: {"causal": True, "position": -2},
    "causal past the last key": lambda q, k, h: {"causal": True, "position": k + 9},
    "a window": lambda q, k, h: {"causal": True, "position": k - q, "intervals": _window(q, k, 150)},
    "two intervals for each sequence and head": lambda q, k, h: {
        "intervals": torch.randint(0, k + 1, (_BATCH, h, q, 2, 2)).int()
    },
    "intervals past all keys": lambda q, k, h: {
        "intervals": torch.tensor([-3, k + 40]).expand(1, 1, q, 1, 2).int()
    },
    "dead rows": lambda q, k, h: {"intervals": _dead(q, k)},
    "bits": lambda q, k, h: _bits(torch.rand(_BATCH, 1, q, k) < 0.4),
    "bits of heads, with blocks of all and of none": lambda q, k, h: _bits(
        (torch.rand(_BATCH, h, q, k) < 0.5) & (torch.arange(k) < 130) | (torch.arange(k) >= 256)
    ),
    "bits, a window and sinks": lambda q, k, h: {
        "causal": True, "position": k - q, "intervals": _window(q, k, 300), "sinks": torch.randn(h),
        **_bits(torch.rand(_BATCH, 1, q, k) < 0.8),
    },
    "sinks": lambda q, k, h: {"sinks": torch.randn(h).index_fill(0, torch.tensor(0), -math.inf)},
    "sinks of dead rows": lambda q, k, h: {"sinks": torch.randn(h), "intervals": _dead(q, k)},
    "softcap": lambda q, k, h: {"softcap": 1.5, "scale": 0.7, "causal": True, "position": k - q},
    "slopes": lambda q, k, h: {"alibi_slopes": torch.rand(h, dtype=torch.float64) / 8, "position": k - q},
    "a bias": lambda q, k, h: {"bias": torch.randn(_BATCH, 1, q, k)},
    "a bias of heads and keys": lambda q, k, h: {"bias": torch.randn(1, h, 1, k, dtype=torch.float64)},
}  # fmt: skip
#: Queries, keys and heads that share keys; and parts.
_SIZES = (((1, 1, 4), 3), ((3, 63, 8), 1), ((17, 65, 4), 3), ((1, 1000, 8), 7), ((3, 1000, 1), 1))


def check(
    given: dict[str, Any], parts: int, device: torch.device, rtol: float = 2e-5, kernel: Any = kernel, **sizes: int
) -> None:
    """Compare a call with the reference in float64."""
    wide = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    expected = dense.reference(**wide, return_lse=True)
    there = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    call = dense.bind(**there, return_lse=True)
    (out, lse), saved = kernel.attend(call, parts, kernel._launch_of(call) | sizes)
    assert saved == ()
    assert lse is not None
    assert (out.dtype, lse.dtype) == (given["q"].dtype, torch.float32)
    torch.testing.assert_close(out.double().cpu(), expected[0], rtol=rtol, atol=rtol / 10)
    torch.testing.assert_close(lse.double().cpu(), expected[1], rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize(("size", "parts"), _SIZES, ids=str)
@pytest.mark.parametrize("options", _OPTIONS)
def test_whatever_hides_keys_or_changes_scores(
    options: str, size: tuple[int, int, int], parts: int, device: torch.device
) -> None:
    queries, keys, groups = size
    check(arguments(*size) | _OPTIONS[options](queries, keys, groups * _KV_HEADS), parts, device)


@pytest.mark.parametrize("options", ["causal", "bits", "a window"])
def test_many_keys(options: str, device: torch.device) -> None:
    check(arguments(1, 4100, 4) | _OPTIONS[options](1, 4100, 8), 33, device)


@pytest.mark.parametrize("keys", [16, 32])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("options", ["a window", "bits of heads, with blocks of all and of none"])
def test_other_tiles(options: str, rows: int, keys: int, device: torch.device) -> None:
    check(arguments(7, 300, 5) | _OPTIONS[options](7, 300, 10), 3, device, ROWS=rows, KEYS=keys)


@pytest.mark.parametrize("dims", [(5, 23), (16, 1), (80, 80), (33, 128), (192, 256)], ids=str)
def test_heads_of_any_size(dims: tuple[int, int], device: torch.device) -> None:
    check(arguments(2, 90, 3, dims) | _OPTIONS["a window"](2, 90, 6), 2, device)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 3e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_16_bits(dtype: torch.dtype, error: float, device: torch.device) -> None:
    check(arguments(3, 200, 4, dtype=dtype) | _OPTIONS["sinks"](3, 200, 8), 2, device, rtol=error)


def test_strides(device: torch.device) -> None:
    given = arguments(3, 200, 4)
    for name in ("q", "k", "v"):  # tokens before heads, and numbers apart
        given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2).repeat_interleave(2, 3)[..., ::2]
    given |= _bits(torch.rand(1, 8, 3, 200) < 0.5)
    given["blocks"] = torch.nn.functional.pad(given["blocks"], (0, 3, 0, 2), value=7)[..., :2]
    given["bias"] = torch.randn(200, 3).t().expand(1, 1, 3, 200)
    check(given, 2, device)


def test_large_scores(device: torch.device) -> None:
    given = arguments(3, 200, 4)
    given["q"] = given["q"] * 1e4
    check(given, 3, device, rtol=1e-3)


def test_nan_in_what_nobody_sees_has_no_influence(device: torch.device) -> None:
    for hidden, unseen in (
        (_OPTIONS["a window"](3, 300, 8), slice(None, 148)),
        (_bits((torch.rand(1, 1, 3, 300) < 0.5) & (torch.arange(300) < 101)), slice(101, None)),
        ({"causal": True, "position": 190}, slice(193, None)),
    ):
        given = arguments(3, 300, 4) | hidden
        expected, _ = dense.reference(**given)
        for name in ("k", "v"):
            given[name][:, :, unseen] = math.nan
        call = dense.bind(**{name: v.to(device) if isinstance(v, Tensor) else v for name, v in given.items()})
        for parts in _PARTS:
            (out, _), _ = kernel.attend(call, parts, kernel._launch_of(call))
            torch.testing.assert_close(out.cpu(), expected, rtol=2e-5, atol=2e-6)


def test_a_sink_of_nan_reaches_its_head(device: torch.device) -> None:
    given = arguments(1, 200, 2) | {"sinks": torch.tensor([0.0, math.nan, 1.0, -math.inf])}
    call = dense.bind(**{name: value.to(device) for name, value in given.items()})
    for found in kernel.attend(call, 3, kernel._launch_of(call))[0]:
        assert found is not None
        assert found[:, 1].isnan().all()
        assert found[:, [0, 2, 3]].isfinite().all()


def test_repeated_calls_give_the_same_bits(device: torch.device) -> None:
    given = arguments(3, 1000, 4) | _OPTIONS["bits, a window and sinks"](3, 1000, 8)
    call = dense.bind(**{name: v.to(device) if isinstance(v, Tensor) else v for name, v in given.items()})
    (out, lse), (again, lse_again) = (kernel.attend(call, 7, kernel._launch_of(call))[0] for _ in range(2))
    assert lse is not None
    assert lse_again is not None
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


def test_shapes_alone_say_how_keys_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip of 132 processors, in places of `launching.programs`; none of the tensors has memory."""
    for module in (kernel, whole):
        monkeypatch.setattr(module, "chip_of", lambda device: "sm90")
    monkeypatch.setattr(kernel, "programs", lambda device, tiles, warps: min(tiles, 132 * 16 // warps))

    def split(batch: int, queries: int, keys: int, heads: int = 32, kv_heads: int = 8) -> int:
        """Return how many parts there are; 0 if the call is for the other kernel."""
        q = torch.empty(batch, heads, queries, 128, dtype=torch.bfloat16, device="meta")
        k = torch.empty(batch, kv_heads, keys, 128, dtype=torch.bfloat16, device="meta")
        call = dense.bind(q, k, k, softcap=1.0)
        assert kernel.serves(call._replace(needs=("q",)), 1, 8) is False
        launch = kernel._launch_of(call)
        return kernel.parts_of(call, launch) * kernel.serves(call, batch * heads * -(-queries // 128), 8)

    assert [split(1, 1, keys) for keys in (1, 128, 129, 1000, 8192, 131072)] == [1, 1, 2, 8, 32, 33]
    assert [split(batch, 1, 8192) for batch in (2, 8, 64)] == [16, 4, 1]
    assert split(1, 1, 131072, 4, 1) == 128
    # More queries are split where tiles of them would leave half of the chip idle, and there are keys enough.
    assert [split(1, 64, 8192), split(2, 64, 8192), split(8, 64, 8192), split(1, 64, 100)] == [4, 2, 0, 0]


@pytest.mark.parametrize("queries", [1, 17])
def test_the_op_splits_keys_of_few_queries(queries: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    attend = kernel.attend

    def counted(call: Any, count: int, launch: Any) -> Any:
        counts.append(count)
        return attend(call, count, launch)

    monkeypatch.setattr(kernel, "attend", counted)
    monkeypatch.setattr(kernel, "programs", lambda device, tiles, warps: min(tiles, 264))
    given = arguments(queries, 400, 2) | _OPTIONS["a window"](queries, 400, 4) | {"softcap": 2.0}
    call = dense.bind(**{name: v.to(device) if isinstance(v, Tensor) else v for name, v in given.items()})
    (out, lse), _ = whole.forward(call._replace(return_lse=False))
    assert lse is None
    assert counts == [4]
    torch.testing.assert_close(out.cpu(), dense.reference(**given)[0], rtol=2e-5, atol=2e-6)


#: What a fault is, what is there and what is put in its place.
FAULTS = {
    "a part is dropped": ("part < count, other=float", "part < count - 1, other=float"),
    "a part of the output is dropped": ("read = (some < count)", "read = (some < count - 1)"),
    "parts do not share the highest score": ("* tl.exp2(top - base), 0)", ", 0)"),
    "outputs do not share the highest score": ("found * weight[:, None]", "found"),
    "sinks count in each part": ("tl.where(part == 0, sink", "tl.where(part >= 0, sink"),
    "the last full tile is past the last key": ("past = tl.maximum(tl.minimum(most // KEYS",
                                                "past = tl.maximum(tl.minimum(tl.cdiv(most, KEYS)"),
    "rows that see nothing are NaN": ("total = tl.where(dead, 1.0, total)", "total = total + 0.0"),
    "parts that are empty are NaN": ("base = tl.maximum(highest, LOWEST)", "base = highest"),
    "tiles past the full ones are those before": ("past + i - left)", "start + i)"),
    "the tile after a part is left out": ("part * each + each, tiles", "part * each + each - 1, tiles"),
    "a window is of the first query": ("low = tl.maximum(tl.min(begins, 0), 0)", "low = tl.max(begins, 0)"),
    "causality ends at the first query": ("(tl.minimum(line + ROWS, count) - 1) // groups", "line // groups"),
    "all rows see what the last one does": ("line // groups + position + 1), 0)\n    if INT",
                                            "(line + ROWS) // groups + position + 1), 0)\n    if INT"),
    "heads share the first plan": ("stride_ib + head * stride_ih", "stride_ib"),
    "heads of a group share slopes": ("tl.load(slopes + head)", "tl.load(slopes + kv_head * groups + 0 * head)"),
    "heads share a bias": ("(head * stride_bh)[:, None]", "(head * 0)[:, None]"),
}  # fmt: skip
#: Calls that find them: what hides keys or changes scores, and queries, keys, groups and parts.
_CALLS = (
    ("sinks", (3, 1000, 4), 3),
    ("bits of heads, with blocks of all and of none", (3, 300, 4), 2),
    ("a window", (17, 300, 4), 3),
    ("causal", (17, 330, 8), 1),
    ("two intervals for each sequence and head", (3, 65, 4), 2),
    ("slopes", (1, 65, 4), 1),
    ("a bias of heads and keys", (3, 65, 4), 2),
    ("dead rows", (17, 65, 1), 7),
)


@pytest.mark.skipif(not INTERPRETED.value, reason="a fault may read what is not there")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, device: torch.device, tmp_path: Path) -> None:
    faulty = importlib.import_module(f"{planted(tmp_path, 'few', *FAULTS[fault]).__package__}.few")

    def found() -> bool:
        torch.manual_seed(0)
        try:
            for options, size, parts in _CALLS:
                given = arguments(*size) | _OPTIONS[options](size[0], size[1], size[2] * _KV_HEADS)
                check(given, parts, device, kernel=faulty)
        except AssertionError:
            return True
        return False

    assert found()
