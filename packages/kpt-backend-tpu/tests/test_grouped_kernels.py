"""The kernels by JAX on the CPU, Pallas interpreted, against the ops' references: values and gradients."""

import numpy as np
import pytest
import torch

import kpt_core
from kpt_backend_tpu import BACKEND
from kpt_backend_tpu.moe import refusals
from kpt_backend_tpu.tiles import MOST_TILES
from kpt_core.dispatch import force

jax = pytest.importorskip("jax")
from kpt_moe.experts import experts  # noqa: E402
from kpt_moe.grouped_mm import grouped_mm, grouped_mm_wgrad  # noqa: E402

KERNELS = {kernel.op: kernel for kernel in BACKEND.kernels()}


def run(op, *arguments, kernel, wide=False, **options):
    """Return the result of an op and the gradients of its floating arguments."""
    given = [a.double() if wide and torch.is_tensor(a) and a.is_floating_point() else a for a in arguments]
    leaves = [a.detach().clone().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in given]
    with force("tpu", KERNELS[op.name]) if kernel else kpt_core.use("reference", strict=True):
        out = op(*leaves, **options)
        pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
        wanted = [leaf for leaf in leaves if torch.is_tensor(leaf) and leaf.requires_grad]
        return [out.detach(), *torch.autograd.grad(out, wanted, pull)]


def assert_near(op, *arguments, **options):
    for got, want in zip(
        run(op, *arguments, kernel=True, **options),
        run(op, *arguments, kernel=False, wide=True, **options),
        strict=True,
    ):
        coarse = 1e-2 if got.dtype is torch.bfloat16 else 1e-5
        largest = want.abs().max().item() if want.numel() else 0
        torch.testing.assert_close(got.double(), want, rtol=coarse, atol=coarse * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "ends"),
    [(150, 33, 140, (0, 70, 70, 130)), (5, 8, 6, (0, 0, 0)), (0, 8, 6, (0, 0)), (64, 128, 256, (64,))],
)
def test_products_of_groups_and_their_gradients(dtype, rows, inner, columns, ends):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, n, generator=generator).to(dtype) for n in (inner, columns))
    weight = torch.randn(len(ends), inner, columns, generator=generator).to(dtype)
    offsets = torch.tensor(ends, dtype=torch.int32)
    x[ends[-1] :] = y[ends[-1] :] = float("nan")  # rows of nobody
    clean = run(grouped_mm, x, weight, offsets, kernel=True)
    assert not any(tensor.isnan().any() for tensor in clean)
    assert_near(grouped_mm, x.nan_to_num(), weight, offsets)
    assert_near(grouped_mm_wgrad, x.nan_to_num(), y.nan_to_num(), offsets)


FORMS = {
    "swiglu": {},
    "geglu_tanh, stored in by out": {"activation": "geglu_tanh", "transposed": True},
    "gpt-oss": {"alpha": 1.702, "beta": 1.0, "limit": 0.7, "interleaved": True, "transposed": True, "biases": True},
    "relu2 with biases": {"activation": "relu2", "biases": True},
}


@pytest.mark.parametrize("form", FORMS)
def test_experts_and_their_gradients(form):
    options = dict(FORMS[form])
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tokens, hidden, inner, num_experts, top_k = 37, 24, 40, 5, 2
    width = inner if options.get("activation") == "relu2" else 2 * inner
    up, down = normal(num_experts, width, hidden) / 5, normal(num_experts, hidden, inner) / 6
    if options.get("transposed"):
        up, down = up.mT.contiguous(), down.mT.contiguous()
    biases = (normal(num_experts, width), normal(num_experts, hidden)) if options.pop("biases", False) else (None, None)
    index = torch.randint(-1, num_experts + 1, (tokens, top_k), generator=generator)
    index[0, 0] = 2**32 + 1  # of another rank, though its lower half is an expert's
    assert_near(experts, normal(tokens, hidden), index, normal(tokens, top_k), up, down, *biases, **options)


def test_experts_of_no_tokens():
    up, down = torch.randn(3, 8, 4), torch.randn(3, 4, 4)
    index, weights = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)
    out, *grads = run(experts, torch.zeros(0, 4), index, weights, up, down, kernel=True)
    assert out.shape == (0, 4)
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize(("tiles", "right"), [(MOST_TILES, True), (5000, False)])
def test_jax_counts_tiles_rightly_up_to_the_bound_alone(tiles, right):
    """Where the second case fails, JAX has mended its table of tiles, and the bound can go."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

    rows, height = tiles * 128, 128
    ends = rows - height * 64 + height * np.arange(1, 65) - 5  # a group ends in each of the last tiles
    ends[-1] = rows
    sizes = np.diff(ends, prepend=0).astype(np.int32)
    (_, groups, places), count = make_group_metadata(
        group_sizes=jax.numpy.asarray(sizes),
        m=rows,
        tm=height,
        start_group=jax.numpy.int32(0),
        num_nonzero_groups=len(sizes),
        visit_empty_groups=False,
    )
    wanted = [
        (group, tile)
        for group, (end, size) in enumerate(zip(ends, sizes, strict=True))
        for tile in range((end - size) // height, (end - 1) // height + 1)
    ]
    found = list(zip(np.asarray(groups)[: int(count)], np.asarray(places)[: int(count)], strict=True))
    assert (found == wanted) == right


def test_what_the_kernels_do_not_do_is_refused_in_a_sentence():
    assert refusals.too_many_rows(1 << 20, 4) is None
    assert refusals.too_many_rows(1 << 21, 2) is None
    assert "1048577 rows; JAX's grouped kernels" in str(refusals.too_many_rows((1 << 20) + 1, 4))
    x, index, weights = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)
    call = experts.bind(x, index, weights, torch.zeros(3, 8, 4), torch.zeros(3, 4, 4))
    assert refusals.experts(call) is None
    codes = call.gate_up_proj.to(torch.float8_e4m3fn)
    for change, says in (
        ({"gate_up_proj": codes, "gate_up_scale": torch.ones(3, 8)}, "weights of 8 bits"),
        ({"top_k_weights": weights.double()}, "float64"),
        ({"gate_up_proj": torch.zeros(3, 0, 4), "down_proj": torch.zeros(3, 4, 0)}, "without elements"),
    ):
        assert says in str(refusals.experts(call._replace(**change)))
