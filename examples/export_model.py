"""Export a Mixture-of-Experts model as a package, prove it, and see what happens to a package that was changed."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from kpt_moe import MoEConfig, MoELayer
from kpt_serve.package import Manifest, PackageError
from kpt_serve.package.golden import verify
from kpt_serve.package.weights import Program
from kpt_serve.package.writing import write_program

torch.manual_seed(0)
model = nn.Sequential(nn.LayerNorm(64), MoELayer(MoEConfig(hidden_size=64, num_experts=8, top_k=2)), nn.Linear(64, 16))
with tempfile.TemporaryDirectory() as scratch:
    folder = Path(scratch, "scorer")
    # Sizes that are dynamic, with their ranges; the example's own are at least 2.
    dynamic = {"input": {0: ("batch", 1, 64), 1: ("tokens", 1, 512)}}
    write_program(folder, model, torch.randn(2, 8, 64), name="scorer", dynamic=dynamic, outputs=["scores"])
    for path in sorted(folder.iterdir()):
        print(f"{path.name}: {path.stat().st_size:,} bytes")

    # Files, machine and golden results, at three sizes; `kpt export --verify FOLDER` does so in a process of its own.
    report = verify(folder)
    print(report)
    assert report.passed

    # Any size within the ranges; kernels are chosen at each call, on the machine that runs it.
    program = Program(folder, Manifest.read(folder), "cpu")
    x = torch.randn(5, 33, 64)
    with torch.no_grad():
        difference = (program({"input": x})["scores"] - model.eval()(x)).abs().max()
    print(f"largest difference to the model at another size: {difference:.1e}")

    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    try:
        verify(folder)
    except PackageError as error:
        print(f"after one bit was changed: {error}".replace(scratch, "..."))
