"""Attention under masks of every kind, with whatever changes scores, beside the op's reference in float64."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from kpt_attention.dense import dense
from kpt_triton.attention import dense as kernel
from kpt_triton.attention import mask as masks

_BATCH, _HEADS, _KV_HEADS = 2, 4, 2
#: Rows and keys of tiles.
_TILES = ((32, 64), (16, 32), (64, 128))


def _documents(queries: int, keys: int) -> Tensor:
    """Return intervals: each query sees the keys of its document, of 37, 90 and so on."""
    ends = torch.tensor([37, 127, 128, 200, 10_000])
    place = torch.bucketize(torch.arange(queries), ends, right=True)
    begin = torch.cat((torch.zeros(1, dtype=torch.long), ends))[place]
    return torch.stack((begin, ends[place].clamp(max=keys)), -1)[None, None, :, None].int()


def _bits(allowed: Tensor) -> dict[str, Tensor]:
    """Return blocks and bits of what is allowed, `[B, H, Q, K]`: all blocks have bits, but for those of one kind."""
    batch, heads, queries, keys = allowed.shape
    rows, across = -(-queries // 128), -(-keys // 128)
    padded = torch.zeros(batch, heads, rows * 128, across * 128, dtype=torch.bool)
    padded[:, :, :queries, :keys] = allowed
    each = padded.view(batch, heads, rows, 128, across, 128).permute(0, 1, 2, 4, 3, 5).reshape(-1, 128, 128)
    entry = torch.arange(len(each)) + 2
    entry = torch.where(each.flatten(1).all(1), 1, torch.where(each.flatten(1).any(1), entry, 0))
    bits = (each.view(-1, 128, 16, 8).int() << torch.arange(8)).sum(-1).to(torch.uint8)
    return {"blocks": entry.view(batch, heads, rows, across).int(), "block_bits": bits}


#: What hides keys, for so many queries and keys.
_MASKS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "nothing": lambda q, k: {},
    "causal": lambda q, k: {"causal": True, "position": k - q},
    "causal from the first key": lambda q, k: {"causal": True},
    "causal before the first key": lambda q, k: {"causal": True, "position": -9},
    "documents": lambda q, k: {"causal": True, "intervals": _documents(q, k)},
    "two intervals for each sequence and head": lambda q, k: {
        "intervals": torch.randint(0, k + 1, (_BATCH, _HEADS, q, 2, 2)).int()
    },
    "an interval of all, and rows of none": lambda q, k: {
        "intervals": (torch.tensor([0, k + 5]) * (torch.arange(q) % 50 != 3)[:, None])[None, None, :, None].int()
    },
    "bits": lambda q, k: _bits(torch.rand(1, 1, q, k) < 0.3),
    "bits of heads, with blocks of all and of none": lambda q, k: _bits(
        (torch.rand(_BATCH, _HEADS, q, k) < 0.5) & (torch.arange(k) < 130) | (torch.arange(q) < 128)[:, None]
    ),
    "bits, intervals and causality": lambda q, k: {
        "causal": True, "position": 5, "intervals": _documents(q, k), **_bits(torch.rand(_BATCH, 1, q, k) < 0.8)
    },
}  # fmt: skip
_CHANGES: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "nothing": lambda q, k: {},
    "softcap": lambda q, k: {"softcap": 1.5, "scale": 0.7},
    "a negative scale": lambda q, k: {"scale": -0.3},
    "sinks": lambda q, k: {"sinks": torch.tensor([0.5, -math.inf, 3.0, -2.0])},
    "slopes": lambda q, k: {"alibi_slopes": torch.rand(_HEADS, dtype=torch.float64)},
    "a bias": lambda q, k: {"bias": torch.randn(_BATCH, 1, q, k)},
    "a bias of keys, softcap and sinks": lambda q, k: {
        "bias": torch.randn(1, _HEADS, 1, k, dtype=torch.float64), "softcap": 2.0, "sinks": torch.randn(_HEADS)
    },
}  # fmt: skip


def arguments(
    queries: int = 140, keys: int = 200, dims: tuple[int, int] = (8, 8), dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    return {
        "q": torch.randn(_BATCH, _HEADS, queries, dims[0]).to(dtype),
        "k": torch.randn(_BATCH, _KV_HEADS, keys, dims[0]).to(dtype),
        "v": torch.randn(_BATCH, _KV_HEADS, keys, dims[1]).to(dtype),
    }


def check(
    given: dict[str, Any],
    device: torch.device,
    tile: tuple[int, int] = (32, 64),
    rtol: float = 2e-5,
    kernel: Any = kernel,
) -> None:
    """Compare a call with the reference in float64; what nobody sees is NaN in the kernel's arguments."""
    wide = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    expected = dense.reference(**wide, return_lse=True)
    there = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    call = dense.bind(**there, return_lse=True)
    assert kernel.unsupported(call) is None
    (out, lse), saved = kernel.attend(call, kernel._launch_of(call) | {"ROWS": tile[0], "KEYS": tile[1]})
    assert saved == ()
    assert lse is not None
    assert (out.dtype, lse.dtype) == (given["q"].dtype, torch.float32)
    torch.testing.assert_close(out.double().cpu(), expected[0], rtol=rtol, atol=rtol / 10)
    torch.testing.assert_close(lse.double().cpu(), expected[1], rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("tile", _TILES, ids=str)
@pytest.mark.parametrize("mask", _MASKS)
def test_masks(mask: str, tile: tuple[int, int], device: torch.device) -> None:
    check(arguments() | _MASKS[mask](140, 200), device, tile)


@pytest.mark.parametrize("mask", ["nothing", "causal", "documents", "bits"])
@pytest.mark.parametrize("changes", list(_CHANGES)[1:])
def test_whatever_changes_scores(changes: str, mask: str, device: torch.device) -> None:
    check(arguments() | _MASKS[mask](140, 200) | _CHANGES[changes](140, 200), device)


@pytest.mark.parametrize("mask", ["nothing", "causal", "documents", "bits"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 63), (3, 65), (70, 64), (129, 129), (33, 300)])
def test_any_number_of_queries_and_keys(queries: int, keys: int, mask: str, device: torch.device) -> None:
    check(arguments(queries, keys) | _MASKS[mask](queries, keys), device)


@pytest.mark.parametrize("dims", [(5, 23), (16, 1), (80, 80), (33, 128), (192, 256)], ids=str)
def test_heads_of_any_size(dims: tuple[int, int], device: torch.device) -> None:
    check(arguments(40, 90, dims) | _MASKS["documents"](40, 90), device)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 3e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_16_bits(dtype: torch.dtype, error: float, device: torch.device) -> None:
    check(arguments(dtype=dtype) | _MASKS["documents"](140, 200) | _CHANGES["sinks"](140, 200), device, rtol=error)


def test_strides(device: torch.device) -> None:
    given = arguments()
    for name in ("q", "k", "v"):  # tokens before heads, and numbers apart
        given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2).repeat_interleave(2, 3)[..., ::2]
    given["blocks"], given["block_bits"] = _bits(torch.rand(1, _HEADS, 140, 200) < 0.5).values()
    given["blocks"] = torch.nn.functional.pad(given["blocks"], (0, 3, 0, 2), value=7)[..., :3, :]
    given["block_bits"] = torch.cat((given["block_bits"].new_zeros(3), given["block_bits"].flatten()))[3:].view(
        -1, 128, 16
    )
    given["bias"] = torch.randn(200, 140).t().expand(1, 1, 140, 200)
    check(given, device)


@pytest.mark.parametrize("mask", ["causal before the first key", "documents", "bits of the first keys"])
def test_nan_in_what_nobody_sees_has_no_influence(mask: str, device: torch.device) -> None:
    check_unseen(mask, device)


def check_unseen(mask: str, device: torch.device, kernel: Any = kernel) -> None:
    """Compare with the reference a call in which NaN is what no query sees."""
    given = arguments(70, 200)
    if mask == "bits of the first keys":
        given |= _bits(torch.rand(1, 1, 70, 200).lt(0.5) & (torch.arange(200) < 101))
        unseen = slice(101, None)
    elif mask == "documents":
        given |= {"intervals": _documents(70, 128)}
        unseen = slice(128, None)
    else:
        given |= _MASKS[mask](70, 200)
        unseen = slice(61, None)
    wide = {name: each.double() if name in "qkv" else each for name, each in given.items()}
    expected, _ = dense.reference(**wide)
    for name in ("k", "v"):
        given[name][:, :, unseen] = math.nan
    there = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    (out, _), _ = kernel.forward(dense.bind(**there))
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-5, atol=2e-6)


def test_a_sink_of_nan_reaches_its_head(device: torch.device) -> None:
    given = arguments() | {"sinks": torch.tensor([0.0, math.nan, 1.0, 2.0])}
    call = dense.bind(**{name: value.to(device) for name, value in given.items()})
    for found in kernel.forward(call)[0]:
        assert found is not None
        assert found[:, 1].isnan().all()
        assert found[:, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("tile", [(32, 64), (128, 128), (64, 32)], ids=str)
@pytest.mark.parametrize("mask", [name for name in _MASKS if name not in ("nothing", *list(_MASKS)[1:4])])
def test_the_schedule_has_each_tile_that_is_seen_once(
    mask: str, tile: tuple[int, int], turned: bool, device: torch.device
) -> None:
    given = arguments(140, 200, (1, 1)) | _MASKS[mask](140, 200)
    seen = torch.isfinite(dense.reference(
        **{**given, "q": torch.zeros(_BATCH, _HEADS, 140, 200), "k": torch.eye(200).expand(_BATCH, _KV_HEADS, -1, -1),
           "v": torch.eye(200).expand(_BATCH, _KV_HEADS, -1, -1)})[0].log())  # fmt: skip
    call = dense.bind(**{name: v.to(device) if isinstance(v, Tensor) else v for name, v in given.items()})
    launch = kernel._launch_of(call) | {"ROWS": tile[0], "KEYS": tile[1]}
    unused = torch.empty(1, device=device)
    lists, counts, _ = masks.schedule(call, launch, masks.tensors_of(call), unused, turned=turned)
    if turned:
        tile, seen = tile[::-1], seen.mT
    across = triton.cdiv(seen.shape[3], tile[1])
    assert lists.shape[2:] == (triton.cdiv(seen.shape[2], tile[0]), across)
    for batch, head, line in itertools.product(*map(range, lists.shape[:3])):
        full, masked = counts[batch, head, line].tolist()
        listed = lists[batch, head, line].tolist()
        found = dict.fromkeys(listed[:full], 2) | dict.fromkeys(listed[across - masked :], 1)
        assert len(found) == full + masked
        for place in range(across):
            part = seen[batch, head, line * tile[0] :][: tile[0], place * tile[1] :][:, : tile[1]]
            if found.get(place) == 2:
                assert part.all()
                assert part.shape[1] == tile[1]
            elif place not in found:
                assert not part.any()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dropout": 0.5, "seed": 1}, "dropout"),
        ({"relative_bias": torch.randn(_HEADS, 3)}, "relative_bias"),
        (
            dict.fromkeys("qk", torch.randn(1, 2, 2, 300)) | {"v": torch.randn(1, 2, 2, 8), "sinks": None},
            "head_dim 300",
        ),
        ({"return_lse": False, "causal": True}, "nothing but causality or a bias"),
        ({"return_lse": False, "bias": torch.zeros(140, 200)[None, None]}, "nothing but causality or a bias"),
        ({"intervals": torch.zeros(1, 1, 140, 0, 2, dtype=torch.int32)}, "no intervals"),
        ({"k": torch.randn(2, 2, 0, 8), "v": torch.randn(2, 2, 0, 8)}, "nothing to compute"),
    ],
)
def test_what_is_for_others(changes: dict[str, Any], said: str) -> None:
    assert said in (kernel.unsupported(dense.bind(**(arguments() | changes))) or "")


def test_gradients_of_few_queries_are_for_others() -> None:
    call = dense.bind(**arguments(15, 40), softcap=1.0)
    assert kernel.unsupported(call) is None
    assert "15 queries; with gradients" in (kernel.unsupported(call._replace(needs=("q",))) or "")


@pytest.mark.parametrize(
    ("chip", "most", "of_gradients"), [("sm90", 256, 128), ("gfx1100", 128, 64), ("gfx1201", 256, 128)]
)
def test_the_largest_head_is_the_chips(
    chip: str, most: int, of_gradients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kernel, kernel.gradients):
        monkeypatch.setattr(module, "chip_of", lambda device: chip)

    def refused(dim: int, *needs: str) -> str:
        call = dense.bind(**arguments(dims=(dim, dim)), softcap=1.0)
        return kernel.unsupported(call._replace(needs=needs)) or ""

    assert refused(most) == refused(of_gradients, "q") == ""
    assert f"up to {most} on {chip}" in refused(most + 1)
    assert f"up to {of_gradients} on {chip}" in refused(of_gradients + 1, "q")
