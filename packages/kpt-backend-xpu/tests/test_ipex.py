"""The backend of Intel's extension for PyTorch: what it refuses, and, with a stand-in for IPEX, what it computes.

`nox -s ipex` runs the suite with the real one.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import kpt_core
from kpt_backend_xpu import ipex
from kpt_backend_xpu.ipex import BACKEND
from kpt_moe.experts import experts

ASKED: list[tuple[int, ...]] = []  #: shapes of the rows that the stand-in was given


def _product(x, rows, choices, gate, up, down, plainly, weights, out, distributed):
    """Compute what IPEX's op does for one expert, as it does: everything rounded to x's dtype."""
    assert (plainly, distributed) == (True, False)
    ASKED.append(tuple(x.shape))
    y = F.linear(F.silu(F.linear(x[rows], gate)) * F.linear(x[rows], up), down)
    return out.index_add_(0, rows, y * weights[rows, choices].unsqueeze(1))


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    ASKED.clear()
    monkeypatch.delenv("KPT_USE", raising=False)
    yield
    monkeypatch.undo()
    kpt_core.refresh()


def _install(monkeypatch, version: str = "2.8.0", torch_version: str = "2.8.0+cpu") -> None:
    monkeypatch.setattr(ipex, "version", lambda name: version)
    monkeypatch.setattr(ipex.torch, "__version__", torch_version)


@pytest.fixture
def installed(monkeypatch):
    """Put a stand-in in the place of IPEX and of the torch that it needs."""
    _install(monkeypatch)
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", ModuleType("intel_extension_for_pytorch"))
    monkeypatch.setattr(torch.ops, "torch_ipex", SimpleNamespace(mixtral_moe_tpp=_product), raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    kpt_core.refresh()


def _arguments(dtype: torch.dtype = torch.float32, tokens: int = 9, transposed: bool = False) -> dict:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 16, 12), (4, 12, 8)) if not transposed else ((4, 12, 16), (4, 8, 12))
    up, down = (torch.randn(shape, generator=generator).to(dtype) / 4 for shape in shapes)
    index = torch.randint(-1, 6, (tokens, 3), generator=generator)  # some pairs are not here, some tokens come twice
    weights = torch.rand(tokens, 3, generator=generator)
    x = torch.randn(tokens, 12, generator=generator).to(dtype)
    given = {"x": x, "top_k_index": index, "top_k_weights": weights}
    return given | {"gate_up_proj": up, "down_proj": down}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_the_references_and_each_takes_its_own_rows(installed, dtype, transposed):
    given = _arguments(dtype, transposed=transposed) | {"transposed": transposed}
    with kpt_core.use("ipex"), kpt_core.record() as selections:
        out = experts(**given)
    assert [each.backend for each in selections] == ["ipex"]
    torch.testing.assert_close(out, experts.reference(**given))
    index = given["top_k_index"]
    assert sum(rows for rows, _ in ASKED) == int(((index >= 0) & (index < 4)).sum())


def test_it_runs_where_it_is_asked_for_by_name_alone(installed):
    call = experts.bind(**_arguments())
    assert "runs where it is asked for" in str(ipex.unsupported(call))
    experts(**_arguments())
    assert ASKED == []
    with kpt_core.use("kpt_backend_xpu.ipex:experts", op="moe.experts"):
        assert ipex.unsupported(call) is None
        experts(**_arguments())
    assert ASKED


def test_without_tokens_ipex_is_not_asked(installed):
    with kpt_core.use("ipex"):
        assert experts(**_arguments(tokens=0)).shape == (0, 12)
    assert ASKED == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"activation": "geglu"}, "plain swiglu alone; got geglu"),
        ({"alpha": 1.702, "limit": 7.0}, r"got swiglu, alpha=1\.702, limit=7\.0"),
        ({"gate_up_proj_bias": torch.zeros(4, 16)}, "adds no bias"),
        ({"gate_up_proj": torch.zeros(4, 16, 12).to(torch.float8_e4m3fn), "gate_up_scale": torch.ones(4, 16)}, "8-bit"),
    ],
)
def test_what_ipex_does_not_compute_is_refused_in_a_sentence(installed, more, says):
    with kpt_core.use("ipex"), pytest.raises(kpt_core.KptError, match=says):
        experts(**_arguments() | more)
    assert ASKED == []


def test_gradients_and_other_dtypes_are_refused(installed):
    given = _arguments()
    given["x"].requires_grad_()
    with kpt_core.use("ipex"), pytest.raises(kpt_core.KptError, match="forward only"):
        experts(**given)
    with kpt_core.use("ipex"), pytest.raises(kpt_core.KptError, match="dtype float16"):
        experts(**_arguments(torch.float16))


def test_it_says_what_is_missing_and_that_ipex_is_archived(monkeypatch):
    _install(monkeypatch, torch_version="2.13.0")
    assert (
        BACKEND.unavailable() == "intel_extension_for_pytorch 2.8.0 runs beside torch 2.8 alone; this is torch 2.13.0"
    )
    monkeypatch.setattr(ipex, "version", lambda name: None)
    assert "not installed; it is archived upstream since March 2026" in str(BACKEND.unavailable())


def test_a_processor_without_avx2_lacks_it(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert BACKEND.capabilities(torch.device("cpu")) == frozenset()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert BACKEND.capabilities(torch.device("cpu")) == {"avx2", "avx512"}
    assert all(kernel.requires <= BACKEND.capabilities(torch.device("cpu")) for kernel in BACKEND.kernels())


def test_the_entry_point_names_it():
    assert kpt_core.backends()["ipex"] is BACKEND
