"""torch.export: the whole range of sizes from any sample, and the program chooses again where it runs."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.export import Dim

import kpt_core
from kpt_core import Backend
from loopback import Loopback, hundreds, kernel, scale
from toy_ops import KERNELS, RAN, layer

Add = Callable[[Backend], Backend]
strictly = pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])


class Model(torch.nn.Module):
    """Two layers and something around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Parameter(torch.randn(5, 6))
        self.second = torch.nn.Parameter(torch.randn(6, 4))
        self.bias = torch.nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return layer(layer(x.sin(), self.first, self.bias), self.second).cos()

    def reference(self, x: Tensor) -> Tensor:
        inner = layer.reference(x.sin(), self.first, self.bias)
        return layer.reference(inner, self.second).cos()


@pytest.mark.parametrize("recording", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("sample", [3, 5, 500])
@strictly
def test_the_whole_range_from_samples_on_both_sides_of_a_gate(
    add: Add, strict: bool, sample: int, recording: bool
) -> None:
    add(Loopback(*KERNELS))
    RAN.clear()
    model = Model()
    with torch.set_grad_enabled(recording):
        program = torch.export.export(
            model, (torch.randn(sample, 5),), dynamic_shapes=({0: Dim("rows", min=1, max=8192)},), strict=strict
        )
    assert not RAN
    (bounds,) = program.range_constraints.values()
    assert (bounds.lower <= 2, bounds.upper) == (True, 8192)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count("kpt.toy_layer.default") == 2
    run = program.module()
    for rows in (1, 2, 64, 65, 500, 8192):
        x = torch.randn(rows, 5)
        with kpt_core.record() as log:
            out = run(x)
        torch.testing.assert_close(out, model.reference(x))
        served = "layer_kernel" if rows <= 64 else "layer_kernel_for_many"
        assert [each.kernel for each in log] == [f"toy_ops:{served}"] * 2


def test_dim_auto_is_not_restricted_to_the_sample_s_side(add: Add) -> None:
    add(Loopback(*KERNELS))
    program = torch.export.export(Model(), (torch.randn(5, 5),), dynamic_shapes=({0: Dim.AUTO},))
    (bounds,) = program.range_constraints.values()
    assert bounds.upper > 2**20


@strictly
def test_what_was_exported_without_kernels_runs_them_and_obeys(add: Add, x: Tensor, strict: bool) -> None:
    class One(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scale(x, x)

    run = torch.export.export(One(), (x,), strict=strict).module()
    assert hundreds(run(x)) == 0
    add(Loopback(kernel("first", priority=1), kernel("second")))
    assert hundreds(run(x)) == 1
    with kpt_core.use("loopback:second"):
        assert hundreds(run(x)) == 2
    with kpt_core.use("reference"):
        assert hundreds(run(x)) == 0


@strictly
def test_an_exported_program_can_be_trained(add: Add, strict: bool) -> None:
    add(Loopback(*KERNELS))
    model, x = Model(), torch.randn(7, 5)
    program = torch.export.export(model, (x,), strict=strict)
    run = program.module()
    run(x).sum().backward()
    model.reference(x).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(run.get_parameter(name).grad, parameter.grad)


#: Loads a program, with and without the kernels, and prints what ran for 2 rows and for 500.
LOAD = """
import sys, torch, kpt_core, toy_ops
from loopback import Loopback
run = torch.export.load(sys.argv[1]).module()
for kernels in ((), toy_ops.KERNELS):
    if kernels:
        kpt_core.registry.add_backend(Loopback(*kernels))
    for rows in (2, 500):
        with kpt_core.record() as log:
            run(torch.ones(rows, 5))
        print(*[each.kernel for each in log])
"""


@pytest.mark.parametrize("sample", [5, 500])
@strictly
def test_a_file_is_loaded_by_a_process_that_chooses_by_what_it_has(
    add: Add, tmp_path: Path, strict: bool, sample: int
) -> None:
    add(Loopback(*KERNELS))
    shapes = ({0: Dim("rows", min=1, max=8192)},)
    program = torch.export.export(Model(), (torch.randn(sample, 5),), dynamic_shapes=shapes, strict=strict)
    torch.export.save(program, tmp_path / "model.pt2")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path / "model.pt2"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "KPT_DISABLE": "cpu,nvidia"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "reference reference",
        "reference reference",
        "toy_ops:layer_kernel toy_ops:layer_kernel",
        "toy_ops:layer_kernel_for_many toy_ops:layer_kernel_for_many",
    ], done.stderr
