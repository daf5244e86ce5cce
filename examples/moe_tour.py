"""A tour of kpt-moe in eight parts. Every figure is measured while you look.

    python examples/moe_tour.py
    python examples/moe_tour.py --part 4

It needs kpt-moe alone; part 5 compares with transformers where that is installed.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from kpt_moe import BiasBalancer, MoELayer, RouterStatistics, Routing, create_moe_layer
from kpt_moe.expert_networks import EXPERTS, FeedForwardExpert, QuantizedFeedForwardExpert
from kpt_moe.layers import LAYERS, SharedExperts
from kpt_moe.losses import switch_loss
from kpt_moe.offload import checkpoint_experts, offload_experts
from kpt_moe.parallel import average_gradients, parallelize_experts
from kpt_moe.routers import ROUTERS
from kpt_moe.scheduling import CapacitySchedule, ExpertDropout, UtilisationMonitor, revive_dead_experts
from kpt_moe.statistics import RouterSummary
from kpt_optimize import gain_of, interleaved_times

torch.set_num_threads(1)  # sizes as small as these gain nothing from more
CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "num_experts": 8, "intermediate_size": 128}


def make(kind: str = "standard", *, seed: int = 0, **config: Any) -> MoELayer:
    """A layer that is the same whenever, and on whichever rank, it is made."""
    torch.manual_seed(seed)
    return create_moe_layer(kind, **{**SIZES, **config})


def some_tokens(count: int, skew: float = 0.0, seed: int = 1) -> Tensor:
    """Random tokens; what they have in common grows with the skew, and draws a new router to few experts."""
    return torch.randn(count, SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed)) + skew


def observe(layer: MoELayer, x: Tensor) -> RouterSummary:
    """What the router of a layer does with tokens."""
    with RouterStatistics(layer) as statistics, torch.no_grad():
        layer(x)
        return statistics.snapshot()["router"]


def saved_bytes(module: nn.Module, *args: Tensor | Routing) -> int:
    """Bytes that a forward keeps for its backward, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # held, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*args)
    return sum(storage.nbytes() for storage in saved.values())


def table(*rows: Sequence[object]) -> None:
    """Print rows in columns; the first is the head."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        numbers = ("  " + cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ", first.ljust(widths[0]), *numbers)
    print()


def layers() -> None:
    """Layers: five kinds, by name."""
    made = {kind: make(kind) for kind in LAYERS}
    x, rows = some_tokens(1024, skew=0.7), []
    summaries = [observe(layer, x) for layer in made.values()]
    with torch.no_grad():
        times = interleaved_times([partial(layer, x) for layer in made.values()], CPU)
    for (kind, layer), seen, seconds in zip(made.items(), summaries, times, strict=True):
        total = sum(parameter.numel() for parameter in layer.parameters())
        experts = sum(parameter.numel() for parameter in layer.experts.parameters())
        active = total - experts + experts * sum(seen.load) / seen.tokens / layer.experts.num_experts
        figures = (f"{figure:,.0f}" for figure in (total, active, len(x) / median(seconds)))
        rows.append((kind, *figures, f"{seen.dropped_share:.1%}"))
    table(("kind", "parameters", "active per token", "tokens/s forward", "dropped"), *rows)


def routers() -> None:
    """Routers: the same skewed tokens, decided by each."""
    x, rows = some_tokens(1024, skew=0.7), []
    words = torch.arange(1024) ** 2 // 2048  # low ids are frequent
    options = {"hash": {"vocab_size": 512}}
    for name in ROUTERS:
        layer = make(router=name, top_k=1 if name == "switch" else 2, router_options=options.get(name, {}))
        routing = layer.route(x, token_ids=words)
        asked, load = routing.asked_per_expert().float(), routing.tokens_per_expert().float()
        ratios = (f"{count.max() / count.mean():.2f}" for count in (asked, load))
        rows.append((name, *ratios, f"{routing.dropped() / asked.sum():.1%}", f"{load.sum() / len(x):.2f}"))
    table(("router", "asked max/mean", "served max/mean", "dropped", "experts per token"), *rows)


def networks() -> None:
    """Experts: four networks, and 8-bit weights for one of them."""
    x, rows = some_tokens(256), []
    for name, kind in EXPERTS.items():
        layer = make(expert=name, intermediate_size=SIZES["intermediate_size"] if kind.has_width else None)
        trainable = sum(parameter.numel() for parameter in layer.experts.parameters() if parameter.requires_grad)
        rows.append((name, f"{trainable:,}", f"{saved_bytes(layer.experts, x, layer.route(x).detach()):,}"))
    table(("experts", "trainable parameters", "bytes saved for backward"), *rows)

    experts, routing = FeedForwardExpert(64, num_experts=8, intermediate_size=128), make().route(x)
    rows = [("float32", f"{sum(parameter.nbytes for parameter in experts.parameters()):,}", "-")]
    with torch.no_grad():
        expected = experts(x, routing)
        for scheme in ("row", "128x128"):
            small = QuantizedFeedForwardExpert.from_feed_forward(experts, scheme=scheme)
            error = (small(x, routing) - expected).norm() / expected.norm()
            rows.append((f"FP8, {scheme}", f"{sum(p.nbytes for p in small.parameters()):,}", f"{error:.2%}"))
    table(("feed_forward", "bytes of weights", "relative error of outputs"), *rows)


def balancing() -> None:
    """Balancing: the same training without, with a loss, and with a bias that follows the load."""
    torch.manual_seed(3)
    target = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).requires_grad_(False)
    held_out = some_tokens(2048, skew=0.7, seed=0)
    rows = []
    for name, weight, bias in (("none", 0.0, False), ("switch loss", 0.04, False), ("bias", 0.0, True)):
        layer = make(router_options={"correction_bias": bias})
        before = observe(layer, held_out).imbalance
        optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
        balancer = BiasBalancer(layer, rate=5e-3) if bias else None
        for step in range(200):
            x = some_tokens(256, skew=0.7, seed=step + 1)
            routing = layer.route(x)
            loss = F.mse_loss(layer(x, routing), target(x)) + weight * switch_loss(routing)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if balancer is not None:
                balancer.step()
        task = F.mse_loss(layer(held_out), target(held_out)).item()
        rows.append((name, f"{before:.2f}", f"{observe(layer, held_out).imbalance:.2f}", f"{task:.4f}"))
    table(("balancing", "max/mean load before", "after 200 steps", "task loss"), *rows)


def memory() -> None:
    """Memory: what training keeps between forward and backward, the input included."""
    layer, x = make(), some_tokens(512)
    routing = layer.route(x).detach()
    rows = [("kpt", f"{saved_bytes(layer.experts, x, routing):,}")]
    handle = checkpoint_experts(layer)
    rows.append(("kpt, checkpoint_experts", f"{saved_bytes(layer.experts, x, routing):,}"))
    handle.restore()
    if find_spec("transformers") is None:
        print("   transformers is not installed, so there is nothing to compare with")
    else:
        from transformers import Qwen3MoeConfig, Qwen3MoeModel

        import kpt_moe.transformers  # noqa: F401  registers "kpt"

        sizes = {"num_experts": 8, "hidden_size": 64, "moe_intermediate_size": 128}
        model = Qwen3MoeModel(Qwen3MoeConfig(**sizes, num_hidden_layers=1, vocab_size=32))
        for name in ("eager", "grouped_mm", "kpt"):
            model.set_experts_implementation(name)
            saved = saved_bytes(model.layers[0].mlp.experts, x, routing.index, routing.weights)
            rows.append((f"transformers, {name}", f"{saved:,}"))
    table(("experts", "bytes saved for backward"), *rows)


def offloading() -> None:
    """Expert switching: all, half or a quarter of the experts in memory, and the same outputs."""
    model = nn.ModuleList(make(seed=seed) for seed in range(4)).eval()

    def decode(x: Tensor) -> Tensor:
        for layer in model:
            x = x + layer(x)
        return x

    first, rows = None, []
    for budget in ("100%", "50%", "25%"):
        with (
            tempfile.TemporaryDirectory() as folder,
            offload_experts(model, budget, store=f"{folder}/experts.safetensors") as offloading,
            torch.no_grad(),
        ):
            outputs = torch.cat([decode(some_tokens(1, skew=0.7, seed=step)) for step in range(64)])
        total = offloading.total()
        first = outputs if first is None else first
        assert torch.equal(outputs, first), "the budget never changes a result"
        shares = (f"{share:.0%}" for share in (total.hit_rate, total.predicted_right / total.predicted))
        rows.append((budget, *shares, f"{total.bytes_moved / 2**20:.1f}", (outputs - first).abs().max().item()))
    table(("budget", "hit rate", "predictions right", "MiB moved", "largest difference"), *rows)


class CountedExperts(FeedForwardExpert):
    """Feed-forward experts that count the rows they are given."""

    given = 0

    def rows(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As in `FeedForwardExpert`."""
        self.given += len(x)
        return super().rows(x, index, weights)


def parallelism() -> None:
    """Expert parallelism: two ranks with half of the experts each, and a single process."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (2, f"{folder}/store"), nprocs=2)


def rank_main(rank: int, ranks: int, store: str) -> None:
    """What each of the spawned processes does; both make the same layer and the same tokens."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    single, counted = make(), CountedExperts(64, num_experts=8, intermediate_size=128)
    counted.load_state_dict(single.experts.state_dict())
    spread = parallelize_experts(make(experts=counted), mesh["ep"])

    x = some_tokens(512, skew=0.7)
    mine = x.chunk(ranks)[rank]
    out, expected = spread(mine), single(x)
    out.square().mean().backward()
    expected.square().mean().backward()
    average_gradients(spread, mesh)
    torch.testing.assert_close(out, expected.chunk(ranks)[rank])
    error = (out - expected.chunk(ranks)[rank]).abs().max().detach()
    gradient = (counted.down_proj.grad.full_tensor() - single.experts.down_proj.grad).abs().max()
    stayed = (spread.route(mine).index // (8 // ranks) == rank).any(1).sum()
    report = torch.stack((error, gradient, stayed, torch.tensor(counted.given) - stayed))
    reports = [torch.empty_like(report) for _ in range(ranks)]
    dist.all_gather(reports, report)
    if rank == 0:
        rows = [(r, f"{e:.1e}", f"{g:.1e}", int(stay), int(come)) for r, (e, g, stay, come) in enumerate(reports)]
        table(("rank", "largest difference", "of gradients", "rows of its own", "rows from the other"), *rows)
    dist.barrier()  # whoever leaves first closes connections that the other still has
    dist.destroy_process_group()
    # A thread of gloo's that wants the interpreter's lock while the interpreter ends aborts the process ("terminate
    # called without an active exception"), so a rank that is done ends without taking its interpreter apart.
    sys.stdout.flush()
    os._exit(0)


def scheduling() -> None:
    """Scheduling and speed: capacity and experts over the steps, a dead expert's revival, and what routing costs."""
    x, layer = some_tokens(1024, skew=0.7), make("sparse")
    capacity, rows = CapacitySchedule(layer, start=2.5, end=1.0, steps=3), []
    for step in range(4):
        rows.append((step, f"{layer.router.capacity_factor:.1f}", f"{observe(layer, x).dropped_share:.1%}"))
        capacity.step()
    table(("step", "capacity factor", "dropped"), *rows)

    layer = make()
    dropout, rows = ExpertDropout(layer, probability=0.25), []
    for step in range(3):
        training, evaluation = (observe(layer.train(mode), x) for mode in (True, False))
        rows.append((step, 8 - len(training.dead), 8 - len(evaluation.dead)))
        dropout.step()
    table(("step", "experts used in training with dropout", "in evaluation"), *rows)

    layer = make(top_k=1)
    layer.router.weight.data[5] = -1  # no token goes there, since all have a positive mean
    loads = [observe(layer, x).load]
    with UtilisationMonitor(layer, lambda report: revive_dead_experts(layer, report), every=1) as monitor:
        layer(x)
        monitor.step()
    loads.append(observe(layer, x).load)
    table(("tokens of expert", *range(8)), ("one is dead", *loads[0]), ("revived", *loads[1]))

    sparse, dense = make(hidden_size=256, intermediate_size=512), SharedExperts(256, intermediate_size=2 * 512)
    x = torch.randn(1024, 256)
    with torch.no_grad():
        ratio, noise = gain_of(*interleaved_times([partial(dense, x), partial(sparse, x)], CPU, seconds=2))
    print(f"   two of eight experts are {ratio:.2f} ± {noise:.2f} times as fast as a dense block of equal operations")


PARTS = (layers, routers, networks, balancing, memory, offloading, parallelism, scheduling)


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=range(1, len(PARTS) + 1), help="one part alone")
    chosen = parser.parse_args().part
    for number, part in enumerate(PARTS, 1):
        if chosen in (None, number):
            print(f"{number}. {part.__doc__}\n", flush=True)
            part()


if __name__ == "__main__":
    main()
