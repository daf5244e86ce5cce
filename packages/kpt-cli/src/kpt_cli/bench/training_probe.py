"""By how much a training step raises resident memory.

`python -m kpt_cli.bench.training_probe IMPLEMENTATION THREADS JSON`, as `training` calls it.
"""

import json
import sys
from dataclasses import replace

import psutil
import torch

from kpt_cli.peak_memory import forget_peak, peak

from .moe import Shape, transformers_experts
from .training import gradients, make_inputs


def main(implementation: str, threads: str, asked: str) -> None:
    """Print the bytes."""
    torch.set_num_threads(int(threads))
    given = json.loads(asked)
    shape, dtype = Shape(**given["shape"]), getattr(torch, given["dtype"])
    generator = torch.Generator().manual_seed(given["seed"])
    # What libraries keep after their first use is not the step's.
    small = replace(shape, tokens=2 * shape.num_experts, hidden_size=32, intermediate_size=32)
    gradients(transformers_experts(small, dtype, generator), implementation, make_inputs(small, dtype, generator))
    module = transformers_experts(shape, dtype, generator)
    inputs = make_inputs(shape, dtype, generator)
    forget_peak()
    before = psutil.Process().memory_info().rss
    gradients(module, implementation, inputs)
    sys.stdout.write(f"{peak() - before}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
