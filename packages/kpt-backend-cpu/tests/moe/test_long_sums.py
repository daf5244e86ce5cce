"""Sums over very many rows lose nothing that matters."""

import torch

import kpt_core
from kpt_moe.experts import experts
from kpt_moe.grouped_mm import grouped_mm, grouped_mm_wgrad


def test_the_gradient_of_a_bias_over_half_a_million_rows_is_their_sum() -> None:
    rows = 500_000
    x, index = torch.zeros(rows, 1), torch.zeros(rows, 1, dtype=torch.int64)
    up, down = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)
    up_bias, down_bias = torch.ones(1, 1), torch.zeros(1, 1, requires_grad=True)
    with kpt_core.use("cpu"):
        out = experts(x, index, torch.full((rows, 1), 0.1), up, down, up_bias, down_bias, activation="relu")
    (grad,) = torch.autograd.grad(out.sum(), down_bias)
    torch.testing.assert_close(grad, torch.full((1, 1), 0.1 * rows), rtol=1e-5, atol=0)


def test_the_gradient_of_weights_over_many_rows_is_right_where_columns_are_packed_piece_by_piece() -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(40_000, n, generator=generator) for n in (5, 700))
    offsets = torch.tensor([40_000], dtype=torch.int32)
    with kpt_core.use("cpu"):
        got = grouped_mm_wgrad(x, grad, offsets)[0]
    torch.testing.assert_close(got.double(), x.double().T @ grad.double(), rtol=1e-4, atol=2e-3)


def test_products_in_float32_lose_no_more_than_sums_of_128_numbers_do() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((64, 512), (512, 96)))
    sums = []
    for run in zip(x.split(128, dim=1), weight.split(128), strict=True):
        own = torch.zeros(64, 96)
        for column, row in zip(run[0].T, run[1], strict=True):
            own += column[:, None] * row
        sums.append(own)
    exact = x.double() @ weight.double()
    with kpt_core.use("cpu"):
        got = grouped_mm(x, weight[None], torch.tensor([64], dtype=torch.int32))
    error, blocked = ((each.double() - exact).abs().mean() for each in (got, sum(sums[1:], sums[0])))
    assert error <= 1.1 * blocked  # runs of 256 are 1.4 times off
