"""Context parallelism: ranks together give what one process gives, and neither compute nor send what is not seen."""

import json
import random
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from kpt_attention import Mask, attention, causal, context_parallel, document, padding, predicate, sliding_window
from kpt_attention.context_parallel import ContextParallel, balanced, contiguous, work_of_rows, zigzag
from kpt_core import InputError
from test_masks import expression

RANKS = 4
OPTIONS: dict[str, Any] = {"scale": 0.3, "softcap": 5.0}
LAYOUTS = ("balanced", "zigzag", "contiguous")
DOCUMENTS_OF_37 = causal() & document(torch.arange(37) // 15)
DOCUMENTS = document(torch.tensor([0] * 90 + [1] * 7 + [2] * 110 + [3] * 54))
#: The largest error of bfloat16 by that of one process, forward and each gradient: see docs/context_parallel.md.
UPCAST, ROUNDED = 1.1, 4.0


def draw(tokens: int, heads: int = 4, kv_heads: int = 4, batch: int = 2) -> list[Tensor]:
    """Draw q, k, v, sinks, and gradients of the output and the log-sum-exp, the same on every rank."""
    shapes = (batch, heads, tokens, 8), (batch, kv_heads, tokens, 8), (batch, kv_heads, tokens, 6), (heads,)
    return [torch.randn(shape, dtype=torch.float64) for shape in (*shapes, (*shapes[0][:3], 6), shapes[0][:3])]


def alone(drawn: list[Tensor], mask: Mask, dtype: torch.dtype = torch.float64, **biases: Any) -> list[Tensor]:
    """Return the output, the log-sum-exp and the gradients of q, k, v and sinks of one process."""
    *inputs, pull, pull_lse = [x.detach().to(dtype).requires_grad_() for x in drawn]
    q, k, v, sinks = inputs
    out, lse = attention(q, k, v, mask, sinks=sinks, return_lse=True, **OPTIONS, **biases)
    lse = lse.masked_fill(lse == -torch.inf, 0)
    loss = (out * pull.detach()).sum() + (lse * pull_lse.detach()).sum()
    return [out, lse, *torch.autograd.grad(loss, inputs)]


def together(
    cp: ContextParallel, drawn: list[Tensor], dtype: torch.dtype = torch.float64, **biases: Any
) -> list[Tensor]:
    """Return the same of all ranks, whole on each."""
    q, k, v, sinks, pull, pull_lse = (x.to(dtype) for x in drawn)
    inputs = [x.requires_grad_() for x in (*map(cp.shard, (q, k, v)), sinks.detach().clone())]
    out, lse = cp.attention(*inputs[:3], sinks=inputs[3], return_lse=True, **OPTIONS, **biases)
    loss = (out * cp.shard(pull)).sum() + (lse.masked_fill(lse == -torch.inf, 0) * cp.shard(pull_lse)).sum()
    *grads, of_sinks = torch.autograd.grad(loss, inputs)
    dist.all_reduce(of_sinks, group=cp.group)
    return [*map(cp.unshard, (out, lse, *grads)), of_sinks]


def errors(got: list[Tensor], want: list[Tensor]) -> Tensor:
    """Return the largest error of each, NaN where anything is."""
    pairs = zip(got, want, strict=True)
    return torch.stack([(one.detach().double() - other.detach().double()).abs().max() for one, other in pairs])


def masks() -> Iterator[tuple[int, Mask]]:
    for seed in range(10):
        random.seed(seed)
        torch.manual_seed(seed)
        tokens = random.choice([130, 261, 307])
        yield tokens, expression(random.randint(0, 3), tokens, tokens, 2)


# What the ranks do. Each returns what goes wrong: nothing.


def equals_one_process(group: Any, method: str) -> None:
    for seed, (tokens, mask) in enumerate(masks()):
        heads = {"heads": 4, "kv_heads": 2 if group.size() == 2 or method == "ring" else 1}
        drawn = draw(tokens, **heads)
        layout = LAYOUTS[seed % 3]
        cp = ContextParallel(mask, tokens, group, batch=2, heads=4, method=method, layout=layout)
        assert len({len(rows) for rows in cp.layout}) > 1 or tokens % group.size() == 0
        biases = {} if method == "ring" else {"alibi_slopes": torch.rand(4), "relative_bias": torch.randn(4, 9)}
        got = together(cp, drawn, **biases)
        if seed % cp.ranks == cp.rank:  # each has the whole, and one of them looks at it
            differs = errors(got, alone(drawn, mask, **biases)).max()
            assert differs < 1e-11, (seed, layout, mask, differs)


def biases_equal_those_of_one_process(group: Any, method: str) -> None:
    """Each rank gives the rows of its queries; one row for all is the same on all, which add up its gradient."""
    for seed, shape in enumerate(((2, 6, 37, 37), (1, 1, 37, 37), (2, 1, 1, 37), (1, 6, 37, 1), (1, 6, 1, 37))):
        torch.manual_seed(seed)
        drawn = draw(37, heads=6, kv_heads=group.size())
        bias = torch.randn(shape, dtype=torch.float64)
        bias[..., :1, -1] = -torch.inf  # a key that the first row, or no row, sees
        mask = (causal(), DOCUMENTS_OF_37, sliding_window(9))[seed % 3]
        cp = ContextParallel(mask, 37, group, batch=2, heads=6, method=method, layout=LAYOUTS[seed % 3])
        whole = bias.clone().requires_grad_()
        of_rows = shape[2] > 1
        mine = (cp.shard(bias) if of_rows else bias.clone()).requires_grad_()
        want, got = alone(drawn, mask, bias=whole), together(cp, drawn, bias=mine)
        assert errors(got, want).max() < 1e-11, (shape, errors(got, want))
        pull = cp.shard(drawn[4])
        attention(*drawn[:3], mask, bias=whole).mul(drawn[4]).sum().backward()
        cp.attention(*map(cp.shard, drawn[:3]), bias=mine).mul(pull).sum().backward()
        if of_rows:
            grad = cp.unshard(mine.grad)
        else:
            dist.all_reduce(grad := mine.grad, group=cp.group)
        assert errors([grad], [whole.grad]).max() < 1e-11, shape


def dropout_drops_what_one_process_drops(group: Any) -> None:
    for seed, mask in enumerate((causal(), DOCUMENTS_OF_37, predicate(lambda b, h, q, k: (q + k + b + h) % 3 > 0))):
        torch.manual_seed(seed)
        drawn = draw(37, heads=6, kv_heads=group.size(), batch=3)
        cp = ContextParallel(mask, 37, group, batch=3, heads=6, method="ulysses", layout=LAYOUTS[seed])
        options: dict[str, Any] = {"dropout": 0.4, "seed": -7 + (seed << 61), "offset": seed}
        want, kept = alone(drawn, mask, **options), alone(drawn, mask)
        assert errors(together(cp, drawn, **options), want).max() < 1e-11
        assert errors(want[:1], kept[:1]) > 0.1
        # In float32 a backend's kernel may run, which draws in its own way.
        got = together(cp, drawn, torch.float32, **options)
        assert errors(got, want).max() < 1e-4
    with pytest.raises(InputError, match=r"dropout=0\.5 needs a seed, an int that all ranks share; got None"):
        cp.attention(*map(cp.shard, drawn[:3]), dropout=0.5)


def bfloat16_is_as_near(group: Any, upcast: bool) -> None:
    for seed, mask in enumerate((causal(), sliding_window(100), causal() & DOCUMENTS, causal() | DOCUMENTS)):
        torch.manual_seed(seed)
        drawn = [x.bfloat16().double() for x in draw(261)]
        cp = ContextParallel(mask, 261, group, upcast=upcast)
        got = together(cp, drawn, torch.bfloat16)
        if seed != cp.rank:
            continue
        want = alone(drawn, mask)
        ours, one = errors(got, want), errors(alone(drawn, mask, torch.bfloat16), want)
        if upcast:
            assert ours[1] < 2e-6, ours  # of log-sum-exps, float32 in both
            ours[1] = 0
        else:
            ours[5] = 0  # the sinks' gradients are rounded in the sum over ranks, too
        assert (ours / one).max() <= (UPCAST if upcast else ROUNDED), ours / one


def more_ranks_than_rows(group: Any) -> None:
    drawn = draw(3)
    cp = ContextParallel(causal(), 3, group)
    assert min(map(len, cp.layout)) == 0
    assert errors(together(cp, drawn), alone(drawn, causal())).max() < 1e-11
    for method in ("ring", "ulysses"):
        cp = ContextParallel(causal(), 3, group, method=method, layout="contiguous")
        for rows, heads in ((3, 4), (3, 1), (1, 1)):
            bias = torch.randn(1, heads, rows, 3, dtype=torch.float64)
            got = together(cp, drawn, bias=cp.shard(bias) if rows > 1 else bias)
            assert errors(got, alone(drawn, causal(), bias=bias)).max() < 1e-11


def nan_in_padding_reaches_nothing(group: Any) -> None:
    drawn = draw(261)
    seen = torch.arange(261) >= torch.tensor([[9], [200]])
    mask = causal() & padding(seen)
    cp = ContextParallel(mask, 261, group, batch=2, heads=4)
    want = alone(drawn, mask)
    for each in drawn[:3]:
        each.transpose(1, 2)[~seen] = torch.nan
    assert errors(together(cp, drawn), want).max() < 1e-11


def mesh_is_a_group(group: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    drawn = draw(50)
    cp = ContextParallel(causal(), 50, mesh["cp"])
    assert errors(together(cp, drawn), alone(drawn, causal())).max() < 1e-11
    with pytest.raises(InputError, match="one dimension"):
        ContextParallel(causal(), 50, mesh)


def unshard_is_differentiable(group: Any) -> None:
    cp = ContextParallel(causal(), 37, group, layout="zigzag")
    ids = torch.arange(37).expand(2, 37)
    assert torch.equal(cp.shard(ids, dim=1)[0], cp.rows)
    mine = cp.shard(torch.arange(37.0)[None], dim=1).requires_grad_()
    whole = cp.unshard(mine, dim=1)
    assert torch.equal(whole, torch.arange(37.0)[None])
    (whole.square().sum() * (cp.rank + 1)).backward()
    torch.testing.assert_close(mine.grad, 2 * mine.detach() * 10)


class Log:
    """Notes what is posted and what is computed, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sent = self.received = 0

    def __enter__(self) -> "Log":
        self.dense, self.post = context_parallel.dense, dist.batch_isend_irecv

        def dense(*args: Any, **kwargs: Any) -> Any:
            self.events.append("computed")
            return self.dense(*args, **kwargs)

        def post(operations: list[Any]) -> Any:
            for each in operations:
                kind = "receive" if each.op is dist.irecv else "send"
                self.events.append(kind)
                self.received += each.tensor.nbytes if kind == "receive" else 0
                self.sent += each.tensor.nbytes if kind == "send" else 0
            return self.post(operations)

        context_parallel.dense, dist.batch_isend_irecv = dense, post
        return self

    def __exit__(self, *_: object) -> None:
        context_parallel.dense, dist.batch_isend_irecv = self.dense, self.post


def receives_before_it_computes(group: Any) -> None:
    drawn = draw(64)
    cp = ContextParallel(predicate(lambda b, h, q, k: q == q), 64, group)
    q, k, v = (cp.shard(x).requires_grad_() for x in drawn[:3])
    with Log() as log:
        out = cp.attention(q, k, v)
    assert log.events == ["receive", "send", "computed"] * 3 + ["computed"], log.events
    assert log.sent == 3 * (k.nbytes + v.nbytes)
    with Log() as log:
        out.sum().backward()
    assert log.sent == 2 * 3 * (k.nbytes + v.nbytes)  # those again, and gradients
    exchange = ["receive", "send"]
    # Keys and values of the next step are on their way in each step, gradients of the last one too.
    assert log.events == [*exchange, "computed", *exchange, "computed", *exchange, *exchange, "computed", *exchange,
                          "computed", *exchange], log.events  # fmt: skip


def dead_pairs_are_skipped(group: Any) -> None:
    drawn = draw(256)
    for mask, computed, received in (
        (sliding_window(10), 1 + (group.rank() > 0), group.rank() > 0),
        (document(torch.arange(4).repeat_interleave(64)), 1, 0),
        (causal(), 1 + group.rank(), group.rank()),
    ):
        cp = ContextParallel(mask, 256, group, layout="contiguous")
        with Log() as log:
            out = cp.attention(*map(cp.shard, drawn[:3]))
        assert log.events.count("computed") == computed, (mask, log.events)
        assert log.events.count("receive") == received, (mask, log.events)
        torch.testing.assert_close(out, cp.shard(attention(*drawn[:3], mask)))


def errors_say_what_to_do(group: Any) -> None:
    def refused(text: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with pytest.raises(InputError, match=text):
            call(*args, **kwargs)

    q, k, v = draw(50, heads=6, kv_heads=3)[:3]
    cp = ContextParallel(causal(), 50, group)
    refused("the layout is for 3 ranks; the group has 4", ContextParallel, causal(), 50, group, layout=zigzag(50, 3))
    refused("each of 50 rows to one rank", ContextParallel, causal(), 50, group, layout=contiguous(49, 4))
    refused("must be 'ring' or 'ulysses'", ContextParallel, causal(), 50, group, method="star")
    refused("must be balanced, zigzag", ContextParallel, causal(), 50, group, layout="striped")
    refused("ids are", ContextParallel, DOCUMENTS, 50, group)
    refused("must hold all 50 rows", cp.shard, q[:, :, :49])
    refused("must hold the 1. rows of rank", cp.attention, q, k, v)
    mine = [cp.shard(x) for x in (q, k, v)]
    refused("of q's dtype", cp.attention, mine[0], mine[1].float(), mine[2])
    refused("sinks must be", cp.attention, *mine, sinks=torch.zeros(5))
    refused("use method='ulysses'", cp.attention, *mine, alibi_slopes=torch.zeros(6))
    refused(r"no dropout \(got 0\.5\), .* use method='ulysses'", cp.attention, *mine, dropout=0.5, seed=1)
    refused(r"bias must be floating and broadcast to \[2, 6, 1., 50\]", cp.attention, *mine, bias=q[..., :3])
    ulysses = ContextParallel(causal(), 50, group, method="ulysses", layout=cp.layout)
    refused("6 heads of q and 3 of k and v do not divide by 4 ranks", ulysses.attention, *mine)
    if dist.new_group([0]) is dist.GroupMember.NON_GROUP_MEMBER:
        refused("not in the group", ContextParallel, causal(), 50, dist.GroupMember.NON_GROUP_MEMBER)
    refused("the ranks disagree", ContextParallel, causal(), 50 + group.rank() % 2, group)


CHECKS: dict[str, tuple[Callable[..., None], int, tuple[Any, ...]]] = {
    **{
        f"{method} on {ranks} ranks equals one process": (equals_one_process, ranks, (method,))
        for method in ("ring", "ulysses")
        for ranks in (2, 4)
    },
    **{
        f"biases, {method} on {ranks} ranks": (biases_equal_those_of_one_process, ranks, (method,))
        for method in ("ring", "ulysses")
        for ranks in (2, 3)
    },
    **{f"dropout on {ranks} ranks": (dropout_drops_what_one_process_drops, ranks, ()) for ranks in (2, 3)},
    "bfloat16, upcast": (bfloat16_is_as_near, 4, (True,)),
    "bfloat16, rounded": (bfloat16_is_as_near, 4, (False,)),
    **{
        check.__name__: (check, 4, ())
        for check in (
            more_ranks_than_rows,
            nan_in_padding_reaches_nothing,
            mesh_is_a_group,
            unshard_is_differentiable,
            receives_before_it_computes,
            dead_pairs_are_skipped,
            errors_say_what_to_do,
        )
    },
}


def run_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=limit)
    halves, three = [dist.new_group([0, 1]), dist.new_group([2, 3])], dist.new_group([0, 1, 2])
    for name, (check, ranks, arguments) in CHECKS.items():
        group = {2: halves[rank // 2], 3: three, 4: dist.group.WORLD}[ranks]
        failed = ""
        torch.manual_seed(0)  # on a rank that had no part in the check before, too
        try:
            if rank < ranks or ranks == 2:
                check(group, *arguments)
        except BaseException:
            failed = traceback.format_exc()
        (folder / f"{list(CHECKS).index(name)}-{rank}.json").write_text(json.dumps(failed))
        if failed:  # the others wait for this rank until their limit, and fail, too
            return
    dist.barrier()
    dist.destroy_process_group()


def test_on_ranks(tmp_path: Path) -> None:
    """One test, so that the ranks are started once, however many processes share the tests."""
    context = torch.multiprocessing.start_processes(run_rank, (tmp_path,), RANKS, join=False, start_method="spawn")
    assert context is not None
    deadline = time.monotonic() + 240
    try:
        while not context.join(timeout=5):
            done = sorted(file.name for file in tmp_path.glob("*.json"))
            assert time.monotonic() < deadline, f"the ranks hang after {done}"
    finally:
        for process in context.processes:
            process.kill()
    for place, name in enumerate(CHECKS):
        files = [tmp_path / f"{place}-{rank}.json" for rank in range(RANKS)]
        found = [json.loads(file.read_text()) if file.exists() else "not run" for file in files]
        assert not any(found), "\n".join([name, *(f"rank {rank}: {text}" for rank, text in enumerate(found) if text)])


SIZES = [(name, tokens) for name in ("causal", "documents", "both") for tokens in (1000, 8192, 20_011)]


@pytest.mark.parametrize(("name", "tokens"), [*SIZES, ("blocks", 5000)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_work_is_balanced_within_10_percent(name: str, tokens: int, ranks: int) -> None:
    random.seed(tokens)
    documents = document(torch.tensor([random.random() < 8 / tokens for _ in range(tokens)]).cumsum(0))
    mask = {
        "causal": causal(),
        "documents": documents,
        "both": causal() & documents,
        "blocks": causal() & predicate(lambda b, h, q, k: (q // 100 + k // 100) % 2 == 0),
    }[name]
    work = work_of_rows(mask, tokens)
    layout = balanced(work, ranks)
    assert torch.equal(torch.cat(layout).sort().values, torch.arange(tokens))
    loads = torch.tensor([float(work[rows].sum()) for rows in layout])
    assert loads.max() <= 1.1 * loads.mean(), loads
    sizes = [len(rows) for rows in layout]
    assert max(sizes) - min(sizes) <= 2 * 128


def test_work_counts_keys() -> None:
    mask = causal() & DOCUMENTS
    assert torch.equal(work_of_rows(mask, 261), mask.dense(261).sum((0, 1, 3)))


def test_without_a_process_group() -> None:
    with pytest.raises(InputError, match="no process group; start the program with torchrun"):
        ContextParallel(causal(), 64)
