"""Gradients of attention under masks of every kind, beside autograd's of the op's reference in float64."""

import math
from typing import Any

import pytest
import torch
from test_dense import _CHANGES, _MASKS, arguments
from torch import Tensor

from kpt_attention.dense import dense
from kpt_triton.attention import backward as gradients
from kpt_triton.attention import dense as kernel

#: Rows and keys of the tiles of keys, and of those of queries.
_TILES = (((32, 64), (64, 32)), ((16, 32), (32, 64)), ((64, 128), (128, 64)))
_NEEDED = ("q", "k", "v", "sinks")


def check(
    given: dict[str, Any],
    device: torch.device,
    tiles: tuple[tuple[int, int], tuple[int, int]] = _TILES[0],
    rtol: float = 2e-5,
    *,
    kernel: Any = kernel,
    gradients: Any = gradients,
    unseen: slice | None = None,
    dead: slice | None = None,
) -> None:
    """Compare the gradients of a call with the reference's, of the output and the log-sum-exp together.

    Args:
        given: the call's arguments.
        device: of the kernels.
        tiles: as in `_TILES`.
        rtol: of numbers, and of the largest one.
        kernel, gradients: the modules.
        unseen: keys that nobody sees, which are NaN in the kernels' arguments.
        dead: queries that see nothing, likewise, with their gradients.
    """
    needs = [name for name in _NEEDED if given.get(name) is not None]
    wide = {
        name: value.double().requires_grad_(name in needs)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in given.items()
    }
    out, lse = dense.reference(**wide, return_lse=True)
    of_out = torch.randn(out.shape).to(given["q"].dtype)
    of_lse = torch.randn(lse.shape)
    alive = lse.isfinite()
    loss = (out * of_out.double()).sum() + (lse.masked_fill(~alive, 0) * of_lse.double()).sum()
    expected = torch.autograd.grad(loss, [wide[name] for name in needs])
    there = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    if unseen is not None:
        there["k"][:, :, unseen] = there["v"][:, :, unseen] = math.nan
    if dead is not None:
        there["q"][:, :, dead] = of_out[:, :, dead] = of_lse[:, :, dead] = math.nan
    there = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in there.items()}
    call = dense.bind(**there, return_lse=True)._replace(needs=tuple(needs))
    _, saved = kernel.attend(call, kernel._launch_of(call))
    launches = [
        launch | {"ROWS": tile[0], "KEYS": tile[1]}
        for launch, tile in zip(gradients.launches_of(call), tiles, strict=True)
    ]
    found = gradients.gradients(call, saved, of_out.to(device), of_lse.to(device), launches)
    assert found.keys() == set(needs)
    for name, exact in zip(needs, expected, strict=True):
        assert found[name].dtype == given[name].dtype
        assert found[name].shape == given[name].shape
        largest = float(exact.abs().max())
        torch.testing.assert_close(found[name].double().cpu(), exact, rtol=rtol, atol=rtol * largest)


@pytest.mark.parametrize("tiles", _TILES, ids=str)
@pytest.mark.parametrize("mask", _MASKS)
def test_masks(mask: str, tiles: tuple[tuple[int, int], tuple[int, int]], device: torch.device) -> None:
    check(arguments() | _MASKS[mask](140, 200), device, tiles)


@pytest.mark.parametrize("mask", ["nothing", "causal", "documents", "bits"])
@pytest.mark.parametrize("changes", list(_CHANGES)[1:])
def test_whatever_changes_scores(changes: str, mask: str, device: torch.device) -> None:
    check(arguments() | _MASKS[mask](140, 200) | _CHANGES[changes](140, 200), device)


@pytest.mark.parametrize("mask", ["nothing", "causal", "causal from the first key", "documents", "bits"])
@pytest.mark.parametrize(("queries", "keys"), [(16, 1), (17, 63), (70, 64), (129, 129), (33, 300)])
def test_any_number_of_queries_and_keys(queries: int, keys: int, mask: str, device: torch.device) -> None:
    check(arguments(queries, keys) | _MASKS[mask](queries, keys), device)


@pytest.mark.parametrize("dims", [(5, 23), (16, 1), (80, 80), (33, 128)], ids=str)
def test_heads_of_any_size(dims: tuple[int, int], device: torch.device) -> None:
    check(arguments(40, 90, dims) | _MASKS["documents"](40, 90), device)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str)
def test_16_bits(dtype: torch.dtype, error: float, device: torch.device) -> None:
    check(arguments(dtype=dtype) | _MASKS["documents"](140, 200) | _CHANGES["sinks"](140, 200), device, rtol=error)


def test_strides(device: torch.device) -> None:
    given = arguments()
    for name in ("q", "k", "v"):  # tokens before heads, and numbers apart
        given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2).repeat_interleave(2, 3)[..., ::2]
    call = dense.bind(**{name: each.to(device) for name, each in given.items()})._replace(needs=("q", "k", "v"))
    _, saved = kernel.forward(call)
    one = torch.ones((), device=device).expand(saved[0].shape)
    found = gradients.backward(call, saved, one, None)
    leaves = [given[name].double().requires_grad_() for name in "qkv"]
    for name, exact in zip("qkv", torch.autograd.grad(dense.reference(*leaves)[0].sum(), leaves), strict=True):
        torch.testing.assert_close(found[name].double().cpu(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("needed", [("q",), ("v",), ("k", "sinks"), ("sinks",)], ids=str)
def test_what_is_needed_alone(needed: tuple[str, ...], device: torch.device) -> None:
    given = arguments() | _MASKS["documents"](140, 200) | _CHANGES["sinks"](140, 200)
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    every = dense.bind(**given)._replace(needs=_NEEDED)
    _, saved = kernel.forward(every)
    grad = torch.randn_like(saved[0])
    expected = gradients.backward(every, saved, grad, None)
    found = gradients.backward(every._replace(needs=needed), saved, grad, None)
    assert found.keys() == set(needed)
    for name, each in found.items():
        assert torch.equal(each, expected[name])


def test_of_the_log_sum_exp_alone(device: torch.device) -> None:
    given = {name: each.to(device) for name, each in arguments().items()}
    call = dense.bind(**given)._replace(needs=("q", "k", "v"))
    _, saved = kernel.forward(call)
    grad = torch.randn_like(saved[1])
    found = gradients.backward(call, saved, None, grad)
    leaves = [each.double().requires_grad_() for each in given.values()]
    _, lse = dense.reference(*leaves)
    exact = torch.autograd.grad((lse * grad).sum(), leaves[:2])
    torch.testing.assert_close(found["q"].double(), exact[0], rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(found["k"].double(), exact[1], rtol=2e-5, atol=2e-6)
    assert not found["v"].any()


def check_unseen(device: torch.device, **modules: Any) -> None:
    """Compare calls in which NaN is what no query sees, and what queries hold that see nothing."""
    hidden = {"intervals": _MASKS["documents"](140, 128)["intervals"]}
    check(arguments() | hidden, device, unseen=slice(128, None), **modules)
    seen = torch.arange(140).lt(101)[:, None] * torch.tensor([3, 190])
    hidden = {"intervals": seen[None, None, :, None].int()}
    check(arguments() | hidden, device, unseen=slice(190, None), dead=slice(101, None), **modules)
    check(arguments() | _MASKS["causal before the first key"](140, 200), device, dead=slice(0, 9), **modules)


def test_nan_in_what_nobody_sees_and_in_who_sees_nothing_has_no_influence(device: torch.device) -> None:
    check_unseen(device)


@pytest.mark.parametrize("name", ["bias", "alibi_slopes"])
def test_gradients_that_are_for_others(name: str) -> None:
    given = {"bias": torch.zeros(140, 200)[None, None], "alibi_slopes": torch.zeros(4)}[name]
    call = dense.bind(**arguments(), **{name: given})
    assert f"gradients of {name}" in (kernel.unsupported(call._replace(needs=("q", name))) or "")
    assert "gradients" not in (kernel.unsupported(call._replace(needs=("q",))) or "")
