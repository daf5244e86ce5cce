"""What attention takes under torch.func: kernels serve a gradient alone, and plain PyTorch says what it takes."""

import subprocess
import sys

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

import kpt_core
from kpt_attention import causal
from kpt_attention.dense import dense
from kpt_core.errors import KptWarning

# torch 2.13: its own first use of forward-mode AD in a process.
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.script` is deprecated:DeprecationWarning")


def _draw(tokens: int = 96, heads: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, each, tokens, 16, dtype=torch.float64) for each in (heads, 2, 2)]


def test_func_grad_is_served_by_the_kernel_of_eager_calls() -> None:
    q, k, v = _draw()
    slopes, given = torch.rand(4, dtype=torch.float64), causal().plan(96).arguments(96, 96)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        out, lse = dense(q, k, v, alibi_slopes=slopes, **given)
        assert lse is not None
        return out.square().sum() + lse.sin().sum()

    with kpt_core.record() as ran:
        found = grad(loss, (0, 1, 2, 3))(q, k, v, slopes)
    leaves = [each.clone().requires_grad_() for each in (q, k, v, slopes)]
    with kpt_core.record() as eager:
        loss(*leaves).backward()
    assert [each.kernel for each in ran] == [each.kernel for each in eager] != ["reference"]
    torch.testing.assert_close(found, tuple(each.grad for each in leaves))
    without = grad(lambda q: dense(q, k, v, return_lse=False, **given)[0].square().sum())(q)
    torch.testing.assert_close(
        without, grad(lambda q: dense.reference(q, k, v, return_lse=False, **given)[0].square().sum())(q)
    )


def test_second_derivatives_are_those_of_the_reference() -> None:
    q, k, v = (each[:, :, :5, :3] for each in _draw())

    def second(attend: object) -> object:
        def loss(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = attend(q, k, v, causal=True)[0]  # type: ignore[operator]
            return out.pow(3).sum()

        each = vmap(grad(lambda q: loss(q[None], k)))(torch.cat((q, 2 * q)))
        return (grad(lambda k: grad(loss)(q, k).square().sum())(k), hessian(loss)(q, k), each)

    torch.testing.assert_close(second(dense), second(dense.reference))


def test_plain_pytorch_warns_once_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "told_of", set())
    monkeypatch.setattr(dense, "run_reference", lambda call: (call.q * 1, None))  # 2 GB less
    q, k, v = (torch.empty(1, heads, 4096, 64) for heads in (4, 2, 2))

    def directions() -> None:
        jvp(lambda q: dense(q, k, v, return_lse=False)[0], (q,), (q,))

    with pytest.warns(
        KptWarning, match=r"torch\.func\.jvp of attention\.dense .* about 2\.0 GB for q \[1, 4, 4096, 64\]"
    ):
        directions()
    directions()  # warnings are errors


_PEAK = """\
import resource, torch
from kpt_attention.dense import dense
q, k, v = torch.randn(3, 1, 4, {tokens}, 64).unbind()
take = torch.func.grad(lambda q, k, v: dense(q, k, v, causal=True, return_lse=False)[0].square().sum(), (0, 1, 2))
take(*(each[:, :, :64] for each in (q, k, v)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
take(q, k, v)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_func_grad_takes_memory_by_tokens_and_not_by_their_square() -> None:
    pytest.importorskip("resource")
    done = subprocess.run(
        [sys.executable, "-c", _PEAK.format(tokens=2048)], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(done.stdout) < 128 * 1024, f"{int(done.stdout) // 1024} MiB; scores alone would be 64, plain PyTorch 450"
