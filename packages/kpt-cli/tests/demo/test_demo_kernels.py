import pytest
import torch

import kpt_core
from kpt_cli.demo.kernels import kernels_used, pattern
from kpt_cli.demo.model import new_model
from kpt_cli.demo.sizes import QUICK
from kpt_cli.demo.terminal import sparkline, why


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["model.layers.0.mlp"], "model.layers.0.mlp"),
        (["model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.mlp"], "model.layers.{0-2}.mlp"),
        (["layers.0.mlp", "layers.2.mlp", "layers.3.mlp"], "layers.{0,2-3}.mlp"),
        (["layers.9.mlp", "layers.10.mlp"], "layers.{9-10}.mlp"),
        (["a.0.b.0", "a.1.b.1"], "a.0.b.0, a.1.b.1"),
        (["encoder.mlp", "decoder.mlp"], "encoder.mlp, decoder.mlp"),
        (["mlp", "layers.0.mlp"], "mlp, layers.0.mlp"),
    ],
)
def test_pattern(modules, expected):
    assert pattern(modules) == expected


def test_every_op_is_told_with_its_modules():
    model = new_model(QUICK, 0)
    rows = kernels_used(model, torch.zeros(1, 5, dtype=torch.int64))
    assert rows[0].op == "moe.experts"
    assert rows[0].level == 0
    assert rows[0].modules == tuple(f"model.layers.{layer}.mlp.experts" for layer in range(QUICK.layers))


def test_what_is_forced_is_what_is_told():
    model = new_model(QUICK, 0)
    with kpt_core.use("reference"):
        rows = kernels_used(model, torch.zeros(1, 5, dtype=torch.int64))
    assert {row.kernel for row in rows} == {"reference"}


def test_no_hook_is_left_behind():
    model = new_model(QUICK, 0)
    kernels_used(model, torch.zeros(1, 5, dtype=torch.int64))
    assert not any(module._forward_hooks for module in model.modules())


def test_why():
    assert why("reference", ["nvidia: needs sm90"]) == "nvidia: needs sm90"
    assert why("reference", []) == "no installed backend offers a kernel here"
    assert why("a.b:c", []) == "the first choice"


def test_sparkline():
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([8.0, 4.0, 1.0]) == "█▄▁"
    assert len(sparkline([float(n) for n in range(1000)])) <= 24
