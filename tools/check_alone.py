"""Check that an installed package of ours works where its requirements are all that is installed beside it.

Run where only the wheels of kpt-core, then of one feature, are: `python tools/check_alone.py kpt-moe`. Every module is
imported but those whose subject is an extra, and a layer or an op runs forward and backward.
"""

import importlib
import pkgutil
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

import torch

#: What needs a library that is an extra lies in modules of these names, and users import those by name; case tables and
#: plans need kpt-optimize.
EXTRAS = {"cases", "planner", "transformers", "transformers_cache"}


def import_all(package: str) -> int:
    """Import every module of a package, and return how many there are."""
    found = [info.name for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")]
    wanted = [name for name in found if not EXTRAS & {*name.split(".")} and not name.endswith(".__main__")]
    for name in wanted:
        importlib.import_module(name)
    return len(wanted)


def run_core() -> None:
    """Run an op that is registered here, and its gradient."""
    from kpt_core import op

    @op("alone.double", fake=lambda call: torch.empty_like(call.x))
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    x = torch.ones(3, requires_grad=True)
    double(x).sum().backward()
    assert x.grad is not None, "the op has no gradient"
    assert x.grad.tolist() == [2.0, 2.0, 2.0], f"expected a gradient of 2, got {x.grad.tolist()}"


def run_moe() -> None:
    """Run a layer forward and backward, and with its experts in a file."""
    from kpt_moe import MoEConfig, MoELayer
    from kpt_moe.offload import offload_experts

    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(hidden_size=16, intermediate_size=32, num_experts=4, top_k=2))
    x = torch.randn(5, 16)
    out = layer(x)
    out.sum().backward()
    without = [name for name, parameter in layer.named_parameters() if parameter.grad is None]
    assert out.shape == x.shape, f"expected {list(x.shape)}, got {list(out.shape)}"
    assert not without, f"parameters without a gradient: {', '.join(without)}"
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        offload_experts(layer, "50%", store=Path(folder, "experts.safetensors"))
        assert torch.allclose(layer(x), out, atol=1e-5), "experts from a file give another output"


def run_fp8() -> None:
    """Run a linear layer whose weight is 8-bit, forward and backward, and convert a checkpoint."""
    from safetensors.torch import save_file

    from kpt_fp8 import linear, quantize
    from kpt_fp8.checkpoints import convert_checkpoint

    codes, scale = quantize(448 * torch.eye(16), granularity="row")  # of 448 the scale is 1, exactly
    x = torch.randn(5, 16, requires_grad=True)
    out = linear(x, codes, scale)
    out.sum().backward()
    assert torch.equal(out, 448 * x), "448 times the identity does not multiply by 448"
    assert x.grad is not None, "x has no gradient"
    assert x.grad.eq(448).all(), f"expected a gradient of 448, got {x.grad}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        source.mkdir()
        source.joinpath("config.json").write_text("{}")
        save_file({"layer.weight": torch.randn(128, 128)}, source / "model.safetensors")
        report = convert_checkpoint(source, Path(folder, "target"), to="fp8")
        assert len(report.tensors) == 1, f"expected a weight in 8 bits, got {report}"


def run_attention() -> None:
    """Attend under a mask, forward and backward."""
    from kpt_attention import attention, causal, document

    q, k, v = torch.randn(3, 1, 2, 12, 16).unbind()
    q.requires_grad_()
    out = attention(q, k, v, causal() & document(cu_seqlens=torch.tensor([0, 5, 12])))
    out.sum().backward()
    assert torch.allclose(out[:, :, 5], v[:, :, 5]), "the first token of a document sees more than itself"
    assert q.grad is not None, "q has no gradient"


RUNS = {"kpt-core": run_core, "kpt-fp8": run_fp8, "kpt-moe": run_moe, "kpt-attention": run_attention}


def main(distribution: str) -> int:
    """Check one package and return the exit code."""
    allowed = {"kpt-core", distribution}
    ours = {each.metadata["Name"] for each in distributions() if each.metadata["Name"].startswith("kpt-")}
    if ours != allowed:
        print(f"installed are {', '.join(sorted(ours))}; expected {', '.join(sorted(allowed))} alone", file=sys.stderr)
        return 1
    count = import_all(distribution.replace("-", "_"))
    RUNS[distribution]()
    print(f"{distribution}: {count} modules import and it runs with {', '.join(sorted(allowed))} and torch alone")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
