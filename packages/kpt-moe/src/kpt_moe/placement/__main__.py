"""`python -m kpt_moe.placement`: plan where experts should be from a recorded trace, and predict what that gains."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError, KptError
from kpt_moe.routing_trace import RoutingTrace

from .links import ExpertCost, Links
from .placement import Placement, contiguous_placement
from .planner import plan_placement
from .simulator import LayerReport, Report, simulate

_EPILOG = """\
TRACE is what RoutingTrace.save wrote, or a file that ends in .json:
  {"tokens": 4096, "top_k": 2, "loads": {"layer": [rows of expert 0, rows of expert 1, ...], ...}}
Rates without an option are round numbers for illustration, not of your cluster: give those that you measured.
Predictions were not compared with any real cluster.
"""


def main(arguments: list[str] | None = None) -> int:
    """Plan, simulate before and after, print; 1 and a line on stderr for input that does not fit."""
    options = _parser().parse_args(arguments)
    try:
        text, placement = _run(options)
        if options.output:
            placement.save(options.output)
    except (KptError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m kpt_moe.placement",
        description="Plan which rank holds which expert from a recorded load, and predict what that gains.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("trace", metavar="TRACE", help="recorded routing or loads, see below")
    add("--ranks", type=int, required=True, help="that share the experts")
    add("--hidden-size", type=int, required=True, help="of a token")
    add("--intermediate-size", type=int, required=True, help="of an expert")
    add("--ranks-per-node", type=int, help="default: all ranks on one node")
    add("--slots-per-rank", type=int, help="experts that a rank has memory for (default: as few as needed)")
    add("--replicas", type=int, default=0, help="of the hottest experts, at most so many in a layer (%(default)s)")
    add("--groups", type=int, help="runs of experts, each to be kept in one node (default: nodes do not matter)")
    add("--chunks", type=int, default=1, help="parts that rows are sent and computed in (%(default)s)")
    add("--hierarchical", action="store_true", help="rows travel between nodes first, then within them")
    add("--intra-bandwidth", type=float, default=300e9, help="bytes/s of a rank within its node (%(default)g)")
    add("--inter-bandwidth", type=float, default=40e9, help="bytes/s of a rank between nodes (%(default)g)")
    add("--intra-latency", type=float, default=2e-6, help="seconds per message within a node (%(default)g)")
    add("--inter-latency", type=float, default=5e-6, help="seconds per message between nodes (%(default)g)")
    add("--flops", type=float, default=400e12, help="operations/s of a rank in experts' products (%(default)g)")
    add("--memory-bandwidth", type=float, default=2.5e12, help="bytes/s at which weights are read (%(default)g)")
    add("--bytes-per-element", type=float, default=2, help="of hidden states and weights (%(default)g)")
    add("--no-gate", action="store_true", help="experts have two matrices rather than three")
    add("--json", action="store_true", help="print JSON rather than tables")
    add("-o", "--output", metavar="FILE", help="write the placement to this JSON file")
    return parser


def _run(options: argparse.Namespace) -> tuple[str, Placement]:
    loads, trace, tokens, top_k = _read(options.trace)
    links = Links(
        ranks=options.ranks,
        ranks_per_node=options.ranks if options.ranks_per_node is None else options.ranks_per_node,
        intra_bandwidth=options.intra_bandwidth,
        inter_bandwidth=options.inter_bandwidth,
        intra_latency=options.intra_latency,
        inter_latency=options.inter_latency,
    )
    cost = ExpertCost.feed_forward(
        options.hidden_size,
        options.intermediate_size,
        top_k=top_k,
        flops_per_second=options.flops,
        memory_bandwidth=options.memory_bandwidth,
        gated=not options.no_gate,
        bytes_per_element=options.bytes_per_element,
    )
    placement = plan_placement(
        loads,
        options.ranks,
        slots_per_rank=options.slots_per_rank,
        replicas=options.replicas,
        nodes=1 if options.groups is None else links.nodes,
        groups=options.groups,
    )
    before, after = (
        simulate(
            placed.loads if trace is None else trace,
            placed,
            links,
            cost,
            tokens=tokens,
            chunks=options.chunks,
            hierarchical=options.hierarchical,
        )
        for placed in (contiguous_placement(placement.loads, options.ranks, placement.layers), placement)
    )
    if options.json:
        found: dict[str, Any] = {"before": before.as_json(), "after": after.as_json(), "placement": placement.as_json()}
        return json.dumps(found), placement
    return _table(before, after, placement), placement


def _read(path: str) -> tuple[dict[str, Tensor], RoutingTrace | None, int | None, int]:
    """Loads `[calls, num_experts]` by layer, the trace or the tokens that they are of, and experts per token."""
    if not path.endswith(".json"):
        trace = RoutingTrace.load(path)
        chosen = [routing.top_k for routings in trace.calls.values() for routing in routings]
        if not chosen:
            raise InputError(f"{path}: holds no calls; record some with kpt_moe.record_routing")
        return trace.loads(), trace, None, max(chosen)
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        loads = {str(name): torch.tensor([row], dtype=torch.float64) for name, row in found["loads"].items()}
        return loads, None, int(found["tokens"]), int(found["top_k"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: holds no loads ({error!r}); see --help for what they look like") from error


def _table(before: Report, after: Report, placement: Placement) -> str:
    width = max(5, *(len(layer.name) for layer in before.layers))
    heads = ("ms", "dispatch", "compute", "combine", "max/mean", "GB in node", "GB between")
    lines = [
        f"{placement.num_experts} experts in {placement.slots} slots on {placement.ranks} ranks; predictions, never "
        "compared with a real cluster",
        f"{'layer':<{width}}         " + "".join(f"{head:>12}" for head in heads),
    ]
    for name, old, new in zip((r.name for r in before.layers), before.layers, after.layers, strict=True):
        lines += [f"{name:<{width}}  before {_cells(old)}", f"{'':<{width}}  after  {_cells(new)}"]
    gain = before.seconds / after.seconds if after.seconds else 1.0
    total = f"{before.seconds * 1e3:.3f} ms before, {after.seconds * 1e3:.3f} ms after"
    return "\n".join([*lines, f"all layers: {total} ({gain:.2f} times as fast)"])


def _cells(layer: LayerReport) -> str:
    times = (layer.seconds, layer.dispatch, layer.compute, layer.combine)
    cells = [f"{seconds * 1e3:12.3f}" for seconds in times]
    cells += [f"{layer.imbalance:12.3f}", f"{layer.intra_bytes / 1e9:12.3f}", f"{layer.inter_bytes / 1e9:12.3f}"]
    return "".join(cells)


if __name__ == "__main__":
    sys.exit(main())
