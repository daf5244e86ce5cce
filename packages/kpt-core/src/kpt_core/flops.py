"""What torch's FLOP counter is told of the torch ops that stand for ops."""

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .operation import Op


def count_flops(op: "Op[..., Any]") -> None:
    """Tell torch's FLOP counter of an op, if the counter is there: importing it takes longer than all of core."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if op.flops is None or counter is None:
        return
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    name, flops, count = op.name.replace(".", "_"), op.flops, len(op.parameters)

    def of_forward(*values: Any, **kwargs: Any) -> int:
        return flops(op.Call(*values[:count], (), None))

    def of_backward(*values: Any, **kwargs: Any) -> int:
        # Products are linear in both factors: as much again for the gradient of each.
        return 2 * flops(op.Call(*values[op.result_count :][:count], (), None))

    # A counter that runs took its copy of the table when it was made.
    running = [getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack()]
    for table in (counter.flop_registry, *(each.flop_registry for each in running if each is not None)):
        for each in (name, *([f"{name}_functional"] if op.mutates else [])):
            table.setdefault(getattr(torch.ops.kpt, each), of_forward)
        table.setdefault(getattr(torch.ops.kpt, f"{name}_backward"), of_backward)
