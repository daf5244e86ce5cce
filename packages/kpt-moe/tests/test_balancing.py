import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from kpt_core import InputError
from kpt_moe import TopKRouter
from kpt_moe.balancing import BiasBalancer
from kpt_moe.scheduling import ExpertDropout, ExpertWarmup

HIDDEN, EXPERTS, TOP_K = 8, 6, 2
SECONDS = 120


class Routers(nn.Module):
    """Two routers with a bias and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K, correction_bias=True, score="sigmoid")
        self.plain = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K)
        self.second = TopKRouter(HIDDEN, num_experts=EXPERTS + 2, top_k=1, correction_bias=True, capacity_factor=1.0)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        weights = [router(x, mask=mask).weights.square().sum() for router in (self.first, self.plain, self.second)]
        return sum(weights)

    def biases(self) -> list[torch.Tensor]:
        return [self.first.correction_bias.clone(), self.second.correction_bias.clone()]


def moved(bias: list[float], asked: list[int], rate: float) -> list[float]:
    """The definition, expert by expert."""
    mean = sum(asked) / len(asked)
    return [b + rate * ((mean > a) - (mean < a)) for b, a in zip(bias, asked, strict=True)]


def test_a_step_is_the_definition_over_all_micro_batches():
    model = Routers()
    balancer = BiasBalancer(model, rate=0.25)
    model.first.correction_bias.copy_(torch.linspace(-1, 1, EXPERTS))
    batches = [(torch.randn(n, HIDDEN), torch.rand(n) < 0.7) for n in (9, 4)]
    asked = [[0] * EXPERTS, [0] * (EXPERTS + 2)]
    for x, mask in batches:
        for counts, router in zip(asked, (model.first, model.second), strict=True):
            # Capacity refuses choices; they were asked for all the same.
            for ids, kept in zip(router(x[mask]).asked().tolist(), mask[mask].tolist(), strict=True):
                for e in ids:
                    counts[e] += kept
    balancer.reset()
    before = [bias.tolist() for bias in model.biases()]
    for x, mask in batches:
        model(x, mask)
    balancer.step()
    for have, bias, counts in zip(model.biases(), before, asked, strict=True):
        torch.testing.assert_close(have, torch.tensor(moved(bias, counts, 0.25)))
    assert any(max(counts) * len(counts) != sum(counts) for counts in asked)


def test_counts_start_anew_after_a_step():
    model = Routers()
    balancer = BiasBalancer(model)
    model(torch.randn(9, HIDDEN))
    balancer.step()
    biases = model.biases()
    assert biases[0].abs().sum() > 0
    balancer.step()
    torch.testing.assert_close(model.biases(), biases, rtol=0, atol=0)


def test_evaluation_does_not_count_and_detaching_stops():
    model = Routers()
    with BiasBalancer(model) as balancer:
        model.eval()(torch.randn(9, HIDDEN))
    model.train()(torch.randn(9, HIDDEN))
    balancer.step()
    assert all(not bias.any() for bias in model.biases())
    assert not any(module._forward_hooks for module in model.modules())


def imbalance(router: TopKRouter, x: torch.Tensor) -> float:
    asked = router(x).asked_per_expert().double()
    return float(asked.max() / asked.mean())


def test_a_skewed_router_becomes_balanced():
    router = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K, correction_bias=True, score="sigmoid")
    direction = torch.randn(HIDDEN)

    def tokens() -> torch.Tensor:
        return torch.randn(256, HIDDEN) + direction

    with torch.no_grad():
        router.weight.add_(torch.linspace(-0.5, 0.5, EXPERTS).unsqueeze(1) * direction)
    held_out = torch.randn(4096, HIDDEN) + direction
    assert imbalance(router, held_out) > 2
    balancer = BiasBalancer(router, rate=0.01)
    for _ in range(300):
        router(tokens())
        balancer.step()
    assert imbalance(router.eval(), held_out) < 1.3


def test_the_rate_is_assigned_to():
    router = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=1, correction_bias=True)
    balancer = BiasBalancer(router)
    balancer.rate = 0.5
    router(torch.randn(1, HIDDEN))
    balancer.step()
    assert sorted(router.correction_bias.tolist()) == [-0.5, 0.5, 0.5, 0.5, 0.5, 0.5]


def test_the_bias_is_moved_in_place_and_saved_with_the_model():
    model = Routers()
    balancer = BiasBalancer(model.bfloat16())
    bias = model.first.correction_bias
    model(torch.randn(9, HIDDEN, dtype=torch.bfloat16))
    balancer.step()
    assert model.first.correction_bias is bias
    assert bias.dtype is torch.float32
    assert torch.equal(model.state_dict()["first.correction_bias"], bias)


@pytest.mark.parametrize("rate", [0.0, -1e-3, float("nan"), float("inf")])
def test_a_rate_that_is_no_positive_number_is_refused(rate):
    with pytest.raises(InputError, match="rate must be a positive number"):
        BiasBalancer(Routers(), rate=rate)


def test_a_model_without_biases_is_refused():
    with pytest.raises(InputError, match="no router of TopKRouter has a correction_bias"):
        BiasBalancer(TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_repeats_is_not_counted_again(reentrant):
    """Two micro-batches of which one is repeated: counted twice it would outweigh the other."""
    left, right = torch.eye(EXPERTS)[:3], torch.eye(EXPERTS)[3:]
    router = TopKRouter(EXPERTS, num_experts=EXPERTS, top_k=1, correction_bias=True, renormalize=False)
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS))
    calls = []
    router.register_forward_hook(lambda *args: calls.append(1))
    balancer = BiasBalancer(router)
    x = left.repeat(2, 1).requires_grad_()
    checkpoint(lambda x: router(x).weights.square().sum(), x, use_reentrant=reentrant).backward()
    router(right.repeat(3, 1))
    assert len(calls) == 3
    assert router.weight.grad.any()
    balancer.step()
    assert router.correction_bias.tolist() == pytest.approx([1e-3] * 3 + [-1e-3] * 3)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K, correction_bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(x).weights.square().sum()


def test_compiled_and_plain_models_move_alike():
    biases = []
    for compiled in (False, True):
        torch.manual_seed(3)
        model = Layer()
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        with BiasBalancer(model) as balancer:
            for _ in range(3):
                run(torch.randn(9, HIDDEN)).backward()
                balancer.step()
        biases.append(model.router.correction_bias)
    assert torch.equal(*biases)
    assert biases[0].any()


def rank_main(rank: int, folder: str) -> None:
    """One of two ranks: its half of each batch, with the all-reduce and without."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    calls = []
    all_reduce = distributed.all_reduce
    distributed.all_reduce = lambda *args, **kwargs: calls.append(1) or all_reduce(*args, **kwargs)
    alone = [distributed.new_group([other]) for other in range(2)][rank]
    found = {}
    for name, group in (("summed", None), ("several", [alone, distributed.group.WORLD]), ("alone", alone)):
        calls.clear()
        found[name] = balanced(group, rank)
        found[f"{name} calls"] = len(calls)
    found["statistics"] = statistics_of(rank)
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(6, HIDDEN, generator=generator) for _ in range(8)]


def half(batch: torch.Tensor, rank: int | None) -> torch.Tensor:
    """Unequal halves; the second rank gets none of some batches."""
    cut = 6 if batch[0, 0] > 0.5 else 4
    return batch if rank is None else (batch[:cut] if rank == 0 else batch[cut:])


def balanced(group, rank: int | None) -> list[torch.Tensor]:
    torch.manual_seed(11)
    model = Routers()
    balancer = BiasBalancer(model, rate=0.01, group=group)
    for step in range(4):
        for micro in batches()[2 * step : 2 * step + 2]:
            model(half(micro, rank))
        balancer.step()
    return model.biases()


def statistics_of(rank: int | None):
    from kpt_moe.statistics import RouterStatistics

    torch.manual_seed(11)
    model = Routers()
    model.second.capacity_factor = None
    with RouterStatistics(model) as statistics:
        for batch in batches():
            model(half(batch, rank))
        statistics.all_reduce()
    return {path: (s.tokens, s.load, s.asked, s.dropped) for path, s in statistics.snapshot().items()}


def test_ranks_agree_with_one_process_on_all_tokens(tmp_path: Path):
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=rank_main, args=(rank, str(tmp_path)), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(SECONDS)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    single = balanced(None, None)
    for found in ranks:
        torch.testing.assert_close(found["summed"], single, rtol=0, atol=0)
        torch.testing.assert_close(found["several"], single, rtol=0, atol=0)
        assert found["statistics"] == statistics_of(None)
        # One for all routers.
        assert found["summed calls"] == 4
    assert any(not torch.equal(a, b) for a, b in zip(ranks[0]["alone"], ranks[1]["alone"], strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(ranks[0]["alone"], single, strict=True))


def test_experts_that_are_not_open_yet_keep_their_bias_and_count_in_no_average():
    model = Routers()
    ExpertWarmup(model.first, 4, 10)
    balancer = BiasBalancer(model.first, rate=0.5)
    model.first.correction_bias.fill_(0.25)
    # With the experts that are not open, the average would be 3: that of the third one would fall.
    index = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 2], [0, 2], [0, 2], [0, 2], [0, 3], [0, 3]])
    model.first.choose = lambda logits, scores, mask, token_ids: (index, None)
    model.first(torch.randn(9, HIDDEN))
    balancer.step()
    assert model.first.correction_bias.tolist() == [-0.25, 0.75, 0.75, 0.75, 0.25, 0.25]


def test_dropped_experts_keep_their_bias_and_count_in_no_average():
    router = TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K, correction_bias=True)
    ExpertWarmup(router, 5, 10)
    dropout = ExpertDropout(router, 0.5)
    balancer = BiasBalancer(router, rate=0.5)
    router.dropped = torch.tensor([False, False, True, False, True, False])
    # With the dropped experts the average would be 2.4, and every other expert would fall.
    index = torch.tensor([[0, 1], [0, 1], [0, 3], [0, 3], [1, 3], [1, 3]])
    router.choose = lambda logits, scores, mask, token_ids: (index, None)
    router(torch.randn(6, HIDDEN))
    balancer.step()
    dropout.step()
    assert router.correction_bias.tolist() == [0, 0, 0, 0, 0, 0]
    router.dropped.zero_()
    router(torch.randn(6, HIDDEN))
    balancer.step()
    assert router.correction_bias.tolist() == [-0.5, -0.5, 0.5, -0.5, 0.5, 0]
