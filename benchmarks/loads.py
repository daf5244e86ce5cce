"""What the benchmark measures: one table, of problems for a CPU and for a GPU, and small ones of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from attention_contests import MASKS, Heads, attention_contest, chat_contest, decode_contest
from devices import Call, Work, last_cache
from experts import SCHEMES, contestants_of, dequantised, ours_of, problem_of, quantised
from fp8_contests import few_rows_contest, linear_contest, quantize_contest
from fp8_contests import product_contest as scaled_mm_contest
from harness import Contest, Contestant, Role
from torch import Tensor
from torch.nn import functional as F

import kpt_core
from kpt_cli.bench.moe import Shape
from kpt_fp8 import quantize_to_fp8
from kpt_moe.permutation import sort_by_expert
from kpt_moe.scaled_grouped_mm import scaled_grouped_mm

#: In the order in which they are measured.
GROUPS = (
    "decode", "product", "prefill", "graph", "step", "gating", "sorting", "attention", "attention step", "chat",
    "pages", "few rows", "fp8",
)  # fmt: skip
#: What tables call dtypes.
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
#: Calls of a decode or a product that are timed in a row on a CPU, see `Contest.in_a_row`.
LAYERS = 4


@dataclass(frozen=True, slots=True)
class Load:
    """A row of the benchmark.

    Attributes:
        group: of `GROUPS`.
        make: makes its contest on a device, with a seed.
        sizes: what is made.
        wanted: of figures on an H200, see `Contest.wanted`.
    """

    group: str
    make: Callable[..., Contest]
    sizes: Mapping[str, Any]
    wanted: Mapping[str, float] = field(default_factory=dict)

    def contest(self, device: torch.device, seed: int) -> Contest:
        """Make what is measured."""
        return replace(self.make(device=device, seed=seed, **self.sizes), wanted=self.wanted)


def experts_contest(
    group: str,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    *,
    kind: str = "cpu",
    scheme: str | None = None,
    gpt_oss: bool = False,
) -> Contest:
    """Make a contest of experts.

    Args:
        group: `decode`, `prefill`, `step`, or `graph`: a prefill as a CUDA graph.
        shape: sizes.
        dtype: of what floats.
        device: where it runs.
        seed: of the numbers.
        kind: whose peers take part, `cpu` or `cuda`.
        scheme: of 8-bit weights, beside which everybody else has those of `dtype`.
        gpt_oss: the network of gpt-oss.
    """
    decode, training = group == "decode", group == "step"
    problem = problem_of(shape, dtype, device, seed, gpt_oss=gpt_oss, decode=decode)
    contestants, absent = contestants_of(problem, kind, training=training)
    weights = problem
    if scheme is not None:
        weights = quantised(problem, scheme)
        # Of the other dtype's contestants KPT is another of our own; plain PyTorch is left out.
        others = [
            replace(c, name=f"{c.name} {NAMES[dtype]}", role="own" if c.role == "kpt" else c.role)
            for c in contestants
            if c.role != "plain"
        ]
        contestants = [*ours_of(weights), *others]
    if training:
        # Weights are read twice and their gradients written; tokens, output and the gradients of both move once.
        moved = 3 * problem.expert_bytes * shape.num_experts + 4 * problem.x.nbytes
    else:
        moved = int(weights.experts_touched * weights.expert_bytes) + 2 * problem.x.nbytes
    names = ("tokens", "hidden_size", "intermediate_size", "num_experts", "top_k")
    return Contest(
        group=group,
        name=shape.name,
        sizes={name: getattr(shape, name) for name in names},
        dtype=NAMES[dtype] if scheme is None else SCHEMES[scheme],
        work=Work((3 if training else 1) * shape.flops, moved, (dtype, torch.float32)),
        contestants=contestants,
        yardstick="eager" if kind == "cpu" and scheme is None else "plain",
        absent=absent,
        # The gradient of the routing weights is another sum than autograd's, of which neither is always the nearer one.
        margins=(1.5, 3.0) if training else (1.1, 2.0),
        training=training,
        in_a_row=LAYERS if decode and device.type == "cpu" else 1,
        graph=group in ("decode", "graph"),
        parameters=problem.copies[0],
        least_saved=problem.least_saved if training else 0,
    )


def product_contest(size: int, rows: int, scheme: str, device: torch.device, seed: int) -> Contest:
    """Make `[rows, size]` of bfloat16 times a square matrix of float8_e4m3fn: one expert's share of a grouped product.

    Beside it: `F.linear` in float32 and bfloat16, and `torch._scaled_mm`, which quantises the left side too. Each takes
    turns over copies of its matrix that together are four times as large as the last cache.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(size, size, generator=generator) / size**0.5
    x = torch.randn(rows, size, generator=generator)
    narrow = quantize_to_fp8(weight.unsqueeze(0), granularity=scheme)
    codes, scale = narrow.codes, narrow.scale
    x16 = x.bfloat16()
    # In blocks the scales are those of the stored matrix, by output and input; the op wants input first.
    own = scale.mT if scale.dim() == 3 else scale
    offsets = torch.tensor([rows], dtype=torch.int32)
    (left, left_scale), (right, right_scale) = _by_tensor(x), _by_tensor(weight)
    scales: dict[str, Any] = {"scale_a": left_scale, "scale_b": right_scale, "out_dtype": torch.bfloat16}

    def contestant(
        name: str, role: Role, dtype: torch.dtype, run: Callable[[Tensor], Tensor], matrix: Tensor, exact: Tensor
    ) -> Contestant:
        calls: list[Call] = [partial(run, each) for each in _copies(matrix, least=2, most=64)]
        return Contestant(name, role, dtype, calls, lambda: [calls[0]()], [exact])

    def linear(dtype: torch.dtype) -> Contestant:
        a, b = x.to(dtype), weight.to(dtype)
        exact = a.double() @ b.double().T
        return contestant(f"linear {NAMES[dtype]}", "peer", dtype, lambda matrix: F.linear(a, matrix), b, exact)

    ours = contestant(
        "kpt",
        "kpt",
        torch.bfloat16,
        lambda matrix: scaled_grouped_mm(x16, matrix.mT, own, offsets),
        codes,
        x16.double() @ dequantised(codes[0], scale[0]).T,
    )
    quantised_left = contestant(
        "_scaled_mm",
        "peer",
        torch.bfloat16,
        lambda matrix: torch._scaled_mm(left, matrix.t(), **scales),
        right,
        (left.double() * left_scale) @ (right.double() * right_scale).T,
    )
    moved = codes.nbytes + scale.nbytes + 4 * rows * size
    return Contest(
        group="product",
        name=f"{size} x {size}, M={rows}",
        sizes={"rows": rows, "inner": size, "columns": size},
        dtype=SCHEMES[scheme],
        work=Work(2 * rows * size * size, moved, (torch.bfloat16, torch.float32)),
        contestants=[ours, ours.in_plain_pytorch(), linear(torch.float32), linear(torch.bfloat16), quantised_left],
        yardstick="plain",
        in_a_row=LAYERS,
    )


def _by_tensor(numbers: Tensor) -> tuple[Tensor, Tensor]:
    scale = numbers.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (numbers / scale).to(torch.float8_e4m3fn), scale


def _copies(tensor: Tensor, *, least: int = 1, most: int = 256) -> list[Tensor]:
    count = max(least, min(-(-4 * last_cache() // tensor.nbytes), most))
    return [tensor, *(tensor.clone() for _ in range(count - 1))]


def gating_contest(tokens: int, experts: int, top_k: int, device: torch.device, seed: int, *, sigmoid: bool) -> Contest:
    """Make top-k gating of float32 logits: softmax as in Qwen3-MoE, or sigmoid, bias and groups as in DeepSeek-V3.

    Beside it: the same in PyTorch's own calls, as transformers' routers have it.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator)
    bias = torch.randn(experts, generator=generator) / 8 if sigmoid else None
    groups = {"num_groups": 8, "top_groups": 4} if sigmoid else {}
    settings: dict[str, Any] = {"top_k": top_k, "score": "sigmoid" if sigmoid else "softmax", **groups}
    gate = partial(kpt_core.get_op("moe.top_k_gating"), correction_bias=bias, **settings)
    peer = partial(_softmax, top_k=top_k) if bias is None else partial(_sigmoid, bias=bias, top_k=top_k)

    def chosen(given: tuple[Tensor, Tensor]) -> list[Tensor]:
        weights, index = given
        return [torch.zeros(tokens, experts, dtype=torch.float64).scatter_(1, index, weights.double())]

    return Contest(
        group="gating",
        name=f"{'sigmoid' if sigmoid else 'softmax'}, {top_k} of {experts}, {counted(tokens)}",
        sizes={"tokens": tokens, "num_experts": experts, "top_k": top_k},
        dtype="fp32",
        work=Work(0, logits.nbytes + tokens * top_k * 12, (torch.float32,)),
        contestants=_three(gate, peer, logits, chosen, chosen(_exact_gating(logits.double(), bias, top_k))),
        yardstick="torch",
    )


def _softmax(logits: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    weights, index = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), index


def _sigmoid(logits: Tensor, *, bias: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    choice = scores + bias
    best = choice.view(len(logits), 8, -1).topk(2, dim=-1)[0].sum(-1).topk(4, dim=-1, sorted=False)[1]
    mask = torch.zeros(len(logits), 8).scatter_(1, best, 1).bool()
    inside = mask.unsqueeze(-1).expand(-1, 8, logits.shape[1] // 8).reshape(len(logits), -1)
    index = choice.masked_fill(~inside, float("-inf")).topk(top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, index)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), index


def _exact_gating(logits: Tensor, bias: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    """Return weights and experts in float64, one token after the other; sigmoid and groups where there is a bias."""
    weights, indices = [], []
    for row in logits:
        scores = allowed = (row - row.max()).exp()
        if bias is not None:
            scores = 1 / (1 + (-row).exp())
            groups = (scores + bias.double()).view(8, -1)
            value = groups.sort(dim=-1, descending=True).values[:, :2].sum(-1)
            kept = value.argsort(descending=True)[:4]
            allowed = torch.full_like(groups, -torch.inf).index_copy(0, kept, groups[kept]).flatten()
        index = allowed.argsort(descending=True)[:top_k]
        indices.append(index)
        weights.append(scores[index] / scores[index].sum())
    return torch.stack(weights), torch.stack(indices)


def sorting_contest(tokens: int, experts: int, top_k: int, device: torch.device, seed: int) -> Contest:
    """Make the order of rows by expert, and where each expert's end; beside it what transformers' grouped_mm does."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, experts, generator=generator).topk(top_k, dim=-1).indices
    flat = index.flatten()

    def peer(index: Tensor) -> tuple[Tensor, Tensor]:
        ids, order = torch.sort(index.reshape(-1))
        counts = torch.histc(ids.float(), bins=experts, min=0, max=experts - 1)
        return order, torch.cumsum(counts, dim=0, dtype=torch.int32)

    def shown(given: tuple[Tensor, Tensor]) -> list[Tensor]:
        order, offsets = given
        return [flat[order], order.sort().values, offsets]

    counts = torch.zeros(experts, dtype=torch.int64).index_add_(0, flat, torch.ones_like(flat))
    expected = (torch.arange(experts).repeat_interleave(counts), torch.arange(flat.numel()), counts.cumsum(0))
    ours = partial(sort_by_expert, num_experts=experts)
    return Contest(
        group="sorting",
        name=f"{top_k} of {experts}, {counted(tokens)}",
        sizes={"tokens": tokens, "num_experts": experts, "top_k": top_k},
        dtype="int64",
        work=Work(0, 2 * index.nbytes, (torch.float32,)),
        contestants=_three(ours, peer, index, shown, [tensor.double() for tensor in expected]),
        yardstick="torch",
    )


def _three(
    kpt: Callable[[Tensor], Any],
    peer: Callable[[Tensor], Any],
    tensor: Tensor,
    shown: Callable[[Any], list[Tensor]],
    exact: Sequence[Tensor],
) -> list[Contestant]:
    """Return KPT with a vendor's kernels and without, and PyTorch's calls."""

    def contestant(name: str, role: Role, run: Callable[[Tensor], Any]) -> Contestant:
        calls: list[Call] = [partial(run, each) for each in copies]
        return Contestant(name, role, torch.float32, calls, lambda: shown(calls[0]()), exact)

    copies = _copies(tensor)
    ours = contestant("kpt", "kpt", kpt)
    return [ours, ours.in_plain_pytorch(), contestant("torch", "peer", peer)]


def counted(tokens: int) -> str:
    """Return a number of tokens in words."""
    return f"{tokens:,} token{'s' if tokens > 1 else ''}"


def _experts(
    group: str, shape: Shape, dtype: torch.dtype, wanted: Mapping[str, float] | None = None, **more: Any
) -> Load:
    return Load(group, experts_contest, {"group": group, "shape": shape, "dtype": dtype, **more}, wanted or {})


def _on_cpu(
    decode: Shape, tokens: Sequence[int], plain: Sequence[Shape], product: int, routing: Sequence[int]
) -> list[Load]:
    """Return the table for a CPU of some sizes."""
    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    shapes = [replace(decode, tokens=count, name=counted(count)) for count in tokens]
    found = [_experts("decode", shape, fp32) for shape in shapes]
    found += [_experts("decode", shape, bf16, scheme=scheme) for shape in shapes for scheme in (None, *SCHEMES)]
    sizes = [{"size": product, "rows": rows, "scheme": scheme} for scheme in SCHEMES for rows in (1, 16)]
    found += [Load("product", product_contest, each) for each in sizes]
    # In float16 PyTorch multiplies at 20 GFLOP/s on many a CPU: a large one would take minutes.
    dtypes = [(shape, dtype) for shape in plain for dtype in (fp32, bf16, *([fp16] if shape is plain[0] else []))]
    found += [_experts("prefill", shape, dtype) for shape, dtype in dtypes]
    found += [_experts("step", shape, dtype) for shape, dtype in dtypes if dtype is not fp16]
    for count in routing:
        for experts, sigmoid in ((64, False), (256, True)):
            given = {"tokens": count, "experts": experts, "top_k": 8, "sigmoid": sigmoid}
            found.append(Load("gating", gating_contest, given))
    found += [Load("sorting", sorting_contest, {"tokens": c, "experts": 64, "top_k": 8}) for c in routing]
    found += _attention_and_linears_on_cpu(small=product < 1024)
    return sorted(found, key=lambda load: GROUPS.index(load.group))


def _attention_and_linears_on_cpu(*, small: bool) -> list[Load]:
    whole, many = Heads("12 of 64", 70 if small else 1024, 12, 12, 64), Heads("32 of 128", 32, 32, 8, 128)
    keys = (17, 64) if small else (17, 64, 192, 256, 512, 2048)
    squares = ((512, 512),) if small else ((4096, 4096), (768, 768), (3072, 768))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        found += _attention(whole, dtype, "eager" if small else "inductor", whole_steps=True)
        of_steps = [(heads, sequences, count, "") for heads in (many, whole) for sequences in (1, 8) for count in keys]
        for heads, sequences, count, added in (*of_steps, (whole, 1, keys[-1], "ALiBi")):
            given = {"heads": replace(heads, tokens=count), "sequences": sequences, "dtype": dtype, "added": added}
            found.append(Load("chat", chat_contest, given))
        pages = replace(many, tokens=70 if small else 4096)
        found.append(Load("pages", decode_contest, {"heads": pages, "sequences": 8, "page": 16, "dtype": dtype}))
        for columns, inner in squares:
            sizes = {"columns": columns, "inner": inner, "dtype": dtype}
            found += [Load("few rows", few_rows_contest, {**sizes, "rows": rows}) for rows in (1, 4, 16)]
    for columns, inner in squares:
        sizes = {"columns": columns, "inner": inner, "dtype": torch.bfloat16, "activations": "none"}
        found += [Load("fp8", linear_contest, {**sizes, "rows": rows}) for rows in (1, 64, 512)]
    return found


def _on_gpu() -> list[Load]:
    """Return the table for a GPU."""
    bf16 = torch.bfloat16
    qwen3 = Shape("Qwen3-30B", 16384, 2048, 768, 128, 8, gated=True)
    mixtral = Shape("Mixtral-8x7B", 8192, 4096, 14336, 8, 2, gated=True)
    plain = [Shape(f"32x128, hidden {h}", 4096, h, 4 * h, 8, 2, gated=False) for h in (512, 1024)]
    gpt_oss = Shape("gpt-oss-20b", 8192, 2880, 2880, 32, 4, gated=True)
    found = []
    for shape, forward, step in ((qwen3, 450.0, 380.0), (mixtral, 600.0, 0.0)):
        over = {"over grouped_mm": 1.3}
        found.append(_experts("prefill", shape, bf16, {"TFLOP/s": forward, **over}, kind="cuda"))
        wanted = {"TFLOP/s": step, **over, "saved": 1.05} if step else {"saved": 1.05}
        found.append(_experts("step", shape, bf16, wanted, kind="cuda"))
    for dtype in (bf16, torch.float32):
        for shape, tokens in zip(plain, (15e6, 8e6), strict=True):
            wanted = {"tokens/s": tokens} if dtype is bf16 else {}
            found += [_experts(group, shape, dtype, wanted, kind="cuda") for group in ("prefill", "graph")]
            found.append(_experts("step", shape, dtype, {"saved": 1.05}, kind="cuda"))
    for model in (Shape("OLMoE", 1, 2048, 1024, 64, 8, gated=True), qwen3):
        for count in (1, 4, 16, 64):
            shape = replace(model, tokens=count, name=f"{model.name}, {counted(count)}")
            found.append(_experts("decode", shape, bf16, {"floor": 0.75}, kind="cuda"))
    found += [_experts(group, gpt_oss, bf16, kind="cuda", gpt_oss=True) for group in ("prefill", "step")]
    llama = Heads("Llama 8B, 8k", 8192, 32, 8, 128)
    found += _attention(llama, bf16, "inductor")
    found += _fp8(4096, 14336, 8192, (1, 16, 4096), bf16, "inductor")
    pages = {"heads": Heads("Llama 8B, 4k", 4096, 32, 8, 128), "sequences": 64, "page": 16, "dtype": bf16}
    found.append(Load("pages", decode_contest, pages))
    return sorted(found, key=lambda load: GROUPS.index(load.group))


def _tiny_on_gpu() -> list[Load]:
    """Return a table that Triton's interpreter computes in seconds."""
    small, fp32 = Shape("tiny", 12, 32, 16, 4, 2, gated=True), torch.float32
    more: dict[str, Any] = {"wanted": {"saved": 1.05}, "kind": "cuda"}
    return [
        _experts("decode", replace(small, tokens=1, name="tiny decode"), fp32, kind="cuda"),
        _experts("prefill", small, fp32, kind="cuda"),
        _experts("graph", replace(small, name="tiny plain", gated=False), fp32, kind="cuda"),
        _experts("step", small, fp32, **more),
        _experts("step", replace(small, name="tiny gpt-oss"), fp32, gpt_oss=True, **more),
        *_attention(Heads("tiny", 70, 4, 2, 16), fp32, "eager"),
        *_fp8(64, 128, 256, (1, 70), torch.bfloat16, "eager"),
        Load(
            "pages", decode_contest, {"heads": Heads("tiny", 40, 4, 2, 16), "sequences": 3, "page": 16, "dtype": fp32}
        ),
    ]


def _attention(heads: Heads, dtype: torch.dtype, compiler: str, *, whole_steps: bool = False) -> list[Load]:
    # FlexAttention has no backward on a CPU, where the small ones of a GPU are measured.
    steps = MASKS if whole_steps or compiler != "eager" else ("causal", "full")
    given = {"heads": heads, "dtype": dtype, "compiler": compiler}
    return [Load("attention", attention_contest, {**given, "kind": kind}) for kind in MASKS] + [
        Load("attention step", attention_contest, {**given, "kind": kind, "training": True}) for kind in steps
    ]


def _fp8(inner: int, columns: int, square: int, rows: Sequence[int], dtype: torch.dtype, compiler: str) -> list[Load]:
    sizes = {"inner": inner, "columns": columns, "dtype": dtype}
    found = [
        Load("fp8", linear_contest, {**sizes, "rows": count, "activations": by})
        for count in rows
        for by in (("none",) if count == 1 else ("none", "row"))
    ]
    found += [Load("fp8", scaled_mm_contest, {"size": square, "granularity": by}) for by in ("tensor", "row", "blocks")]
    given = {"rows": rows[-1], "inner": inner, "dtype": dtype, "compiler": compiler}
    by_blocks = ["1x128"] if inner % 128 == 0 else []
    return found + [Load("fp8", quantize_contest, {**given, "granularity": by}) for by in ("row", *by_blocks)]


_OLMOE = Shape("decode", 1, 2048, 1024, 64, 8, gated=True)
_PLAIN = [Shape(f"32x128, hidden {hidden}", 4096, hidden, 4 * hidden, 8, 2, gated=False) for hidden in (512, 1024)]
_TINY = Shape("2x64, hidden 128", 128, 128, 256, 8, 2, gated=False)
#: For whose kernels -> whether the sizes are small -> what is measured.
LOADS = {
    "cpu": {
        False: _on_cpu(_OLMOE, (1, 4, 8), _PLAIN, 4096, (1, 4096)),
        True: _on_cpu(
            replace(_OLMOE, hidden_size=256, intermediate_size=128, num_experts=16, top_k=4),
            (1, 4),
            [_TINY],
            512,
            (1, 256),
        ),
    },
    "cuda": {False: _on_gpu(), True: _tiny_on_gpu()},
}
