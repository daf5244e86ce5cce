"""Sums over very many rows lose nothing that matters."""

import torch

import kpt_core
import kpt_moe


def test_the_gradient_of_a_bias_over_half_a_million_rows_is_their_sum() -> None:
    rows = 500_000
    x, index = torch.zeros(rows, 1), torch.zeros(rows, 1, dtype=torch.int64)
    up, down = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)
    up_bias, down_bias = torch.ones(1, 1), torch.zeros(1, 1, requires_grad=True)
    with kpt_core.use("cpu"):
        out = kpt_moe.experts(x, index, torch.full((rows, 1), 0.1), up, down, up_bias, down_bias, activation="relu")
    (grad,) = torch.autograd.grad(out.sum(), down_bias)
    torch.testing.assert_close(grad, torch.full((1, 1), 0.1 * rows), rtol=1e-5, atol=0)


def test_the_gradient_of_weights_over_many_rows_is_right_where_columns_are_packed_piece_by_piece() -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(40_000, n, generator=generator) for n in (5, 700))
    offsets = torch.tensor([40_000], dtype=torch.int32)
    with kpt_core.use("cpu"):
        got = kpt_moe.grouped_mm_wgrad(x, grad, offsets)[0]
    torch.testing.assert_close(got.double(), x.double().T @ grad.double(), rtol=1e-4, atol=2e-3)
