"""The fake device: what the CPU computes, on tensors that refuse to meet the CPU's."""

import copy
import io
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kpt_core
from kpt_conformance import fake_device
from kpt_optimize.cases import case_tables

pytestmark = pytest.mark.filterwarnings("ignore:.*runs in plain PyTorch:kpt_core.FallbackWarning")


@pytest.fixture(scope="module", autouse=True)
def fake() -> torch.device:
    return fake_device.enable()


def test_importing_changes_nothing_and_enabling_does() -> None:
    script = (
        "import torch, kpt_conformance.fake_device as f\n"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'\n"
        "assert not hasattr(torch, 'kptfake') and not torch.accelerator.is_available()\n"
        "assert f.enable() == f.enable() == torch.device('kptfake:0')\n"
        "assert torch.ones(1, device='kptfake').device == torch.device('kptfake:0')\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_backward_works_after_one_on_the_cpu() -> None:
    script = (
        "import torch, kpt_conformance.fake_device as f\n"
        "torch.ones(2, requires_grad=True).sum().backward()\n"
        "for index in (0, 1):\n"
        "    f.enable()\n"
        "    x = torch.ones(2, requires_grad=True, device=f'kptfake:{index}')\n"
        "    (x * x).sum().backward()\n"
        "    assert x.grad.tolist() == [2, 2]\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_another_device_type_in_its_place_is_said() -> None:
    script = (
        "import torch, kpt_conformance.fake_device as f\n"
        "torch.utils.rename_privateuse1_backend('other')\n"
        "try: f.enable()\n"
        "except RuntimeError as error: assert \"has 'other'\" in str(error)\n"
        "else: raise SystemExit(1)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda **where: torch.empty(2, 3, **where).fill_(3),
        lambda **where: torch.empty_strided((2, 3), (1, 2), **where).copy_(torch.arange(6.0).view(2, 3)),
        lambda **where: torch.zeros(2, 3, **where),
        lambda **where: torch.ones(2, dtype=torch.bool, **where),
        lambda **where: torch.full((2,), 7, **where),
        lambda **where: torch.arange(5, **where),
        lambda **where: torch.tensor([[1.0, 2.0]], **where),
        lambda **where: torch.eye(3, dtype=torch.bfloat16, **where),
        lambda **where: torch.linspace(0, 1, 5, **where).to(torch.float8_e4m3fn),
        lambda **where: torch.randn(2, 3, **where),
        lambda **where: torch.rand(4, **where),
        lambda **where: torch.randperm(9, **where),
        lambda **where: torch.empty(0, 4, **where),
    ],
)
def test_factories_give_what_the_cpu_gives(make, fake: torch.device) -> None:
    torch.manual_seed(3)
    want = make()
    torch.manual_seed(3)
    got = make(device="kptfake")
    assert (got.device, got.dtype, got.stride(), type(got)) == (fake, want.dtype, want.stride(), Tensor)
    assert torch.equal(got.cpu().float(), want.float())
    assert got.tolist() == want.tolist()
    assert "".join(repr(got).split()).replace("device='kptfake:0',", "").replace(",device='kptfake:0'", "") == "".join(
        repr(want).split()
    )


def test_a_default_device_is_obeyed(fake: torch.device) -> None:
    with fake:
        assert torch.zeros(2).device == fake
    assert torch.zeros(2).device.type == "cpu"


def test_moving_copies(fake: torch.device) -> None:
    here = torch.arange(4.0)
    there = here.to("kptfake")
    here.add_(1)
    back = there.to("cpu")
    there.zero_()
    assert (back.tolist(), there.tolist()) == ([0, 1, 2, 3], [0, 0, 0, 0])
    assert there.to(fake) is there
    assert torch.equal(here.to(fake, torch.float64).cpu(), here.double())
    assert there.copy_(here).tolist() == here.tolist()
    assert there.to("kptfake:1").tolist() == here.tolist()
    assert here.copy_(there.neg_()).tolist() == [-1, -2, -3, -4]


def test_views_share_memory(fake: torch.device) -> None:
    base = torch.zeros(3, 4, device=fake)
    view = base[1:, ::2]
    assert view._base is base
    assert (view.storage_offset(), view.untyped_storage().data_ptr()) == (4, base.untyped_storage().data_ptr())
    version = base._version
    view.add_(1)
    base.t()[0].mul_(5)
    base.view(12).as_strided((2,), (4,), 3).fill_(9)
    base[0] = 7
    base.split(2, dim=1)[1].sub_(1)
    want = torch.zeros(3, 4)
    want[1:, ::2].add_(1)
    want.t()[0].mul_(5)
    want.view(12).as_strided((2,), (4,), 3).fill_(9)
    want[0] = 7
    want.split(2, dim=1)[1].sub_(1)
    assert torch.equal(base.cpu(), want)
    assert base._version > version


def test_gradients_through_changed_views_are_the_cpus(fake: torch.device) -> None:
    def gradient(device: torch.device) -> Tensor:
        x = torch.arange(12.0, device=device).requires_grad_()
        y = x.view(3, 4) * 2
        y[1:, ::2].mul_(3)
        y.t()[0].mul_(y[:, 1].detach().clone())
        (y[1:] * y[1:].flip(0)).sum().backward()
        return x.grad

    got = gradient(fake)
    assert got.device == fake
    assert torch.equal(got.cpu(), gradient(torch.device("cpu")))


def test_out_is_filled_and_resized(fake: torch.device) -> None:
    x = torch.arange(4.0, device=fake)
    kept, empty = torch.empty(4, device=fake), torch.empty(0, device=fake)
    assert torch.add(x, 1, out=kept) is kept
    assert torch.add(x, 2, out=empty) is empty
    assert (kept.tolist(), empty.tolist()) == ([1, 2, 3, 4], [2, 3, 4, 5])
    assert torch.ones(2, 3, device=fake).t_().shape == (3, 2)
    with pytest.raises(RuntimeError, match=r"aten\.mul\.out: expected every tensor on one device.*out \[4\] on cpu"):
        torch.mul(x, x, out=torch.empty(4))


MIXED = {
    "add": (lambda x, y: x + y, r"aten\.add\.Tensor"),
    "add the other way": (lambda x, y: y + x, r"aten\.add\.Tensor"),
    "in place": (lambda x, y: x.mul_(y), r"aten\.mul_\.Tensor"),
    "in place on the other": (lambda x, y: y.mul_(x), r"aten\.mul_\.Tensor"),
    "where": (lambda x, y: torch.where(x > 0, x, y), r"aten\.where\.self"),
    "cat": (lambda x, y: torch.cat((y, x)), r"aten\.cat\.default"),
    "matrix product": (lambda x, y: x.view(1, 3) @ y.view(3, 1), r"aten\.mm\.default"),
    "linear": (lambda x, y: F.linear(x[None], y[None]), r"aten\.\w+\.default"),
    "index": (lambda x, y: x[y.long()], r"aten\.index\.Tensor"),
    "embedding": (lambda x, y: F.embedding(y.long(), x.view(3, 1)), r"aten\.index_select\.default"),
    "index_put": (lambda x, y: x.index_put_((x.long(),), y), r"aten\.\w*index_put\w*\.default"),
    "layer norm": (lambda x, y: F.layer_norm(x, (3,), y, y), r"aten\.\w+\.default"),
}


@pytest.mark.parametrize("other", ["cpu", "kptfake:1"])
@pytest.mark.parametrize("name", MIXED)
def test_mixing_is_an_error_with_op_and_devices(name: str, other: str, fake: torch.device) -> None:
    call, op = MIXED[name]
    x, y = torch.ones(3, device=fake), torch.ones(3, device=other)
    with pytest.raises(RuntimeError) as caught:
        call(x, y)
    message = str(caught.value)
    assert re.match(op + ": expected every tensor on one device, but found", message), message
    assert "kptfake:0" in message
    assert other in message


def test_tensors_without_dimensions_may_be_the_cpus_to_read(fake: torch.device) -> None:
    x, scalar = torch.ones(3, device=fake), torch.tensor(2.0)
    assert (x * scalar).tolist() == (scalar * x).tolist() == x.clone().mul_(scalar).tolist() == [2, 2, 2]
    assert (scalar * x).device == fake
    with pytest.raises(RuntimeError, match=r"aten\.add_\.Tensor: expected every tensor on one device"):
        scalar.add_(x[0])


def test_the_cpus_generator_is_refused(fake: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"expected no generator or one of kptfake:0, but found one of the CPU"):
        torch.randn(3, device=fake, generator=torch.Generator())


def test_numpy_is_refused(fake: torch.device) -> None:
    with pytest.raises(TypeError, match="can't convert kptfake:0"):
        torch.ones(3, device=fake).numpy()


def test_an_op_with_a_kernel_for_the_cpu_alone_is_refused(fake: torch.device) -> None:
    with torch.library._scoped_library("kpt_conformance_test", "FRAGMENT") as library:
        library.define("only_cpu(Tensor x) -> Tensor")
        library.define("everywhere(Tensor x) -> Tensor")
        library.impl("only_cpu", lambda x: x + 1, "CPU")
        library.impl("everywhere", lambda x: x + torch.ones(x.shape, device=x.device), "CompositeExplicitAutograd")
        assert torch.ops.kpt_conformance_test.only_cpu(torch.ones(1)).item() == 2
        assert torch.ops.kpt_conformance_test.everywhere(torch.ones(1, device=fake)).device == fake
        with pytest.raises(NotImplementedError, match=r"only_cpu.* has no kernel for the device type kptfake"):
            torch.ops.kpt_conformance_test.only_cpu(torch.ones(1, device=fake))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.0), nn.Linear(8, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) + self.attention(x, x, x)[0]


def test_a_module_trains_as_on_the_cpu(fake: torch.device) -> None:
    torch.manual_seed(0)
    here = Block()
    there = copy.deepcopy(here).to("kptfake")
    x = torch.randn(2, 3, 4)
    losses = []
    for module, data in ((here, x), (there, x.to(fake))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(data).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for (name, want), got in zip(here.named_parameters(), there.parameters(), strict=True):
        assert got.device == got.grad.device == fake, name
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_modules_are_copied_saved_and_loaded(fake: torch.device) -> None:
    module = Block().to(fake)
    twin = copy.deepcopy(module)
    twin.scale.zero_()
    nn.init.normal_(twin.inner[0].weight)
    assert twin.scale.device == fake
    assert module.scale.tolist() == [2, 2, 2, 2]
    assert not torch.equal(module.inner[0].weight, twin.inner[0].weight)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    for where in ("cpu", None, "kptfake:1"):
        file.seek(0)
        loaded = torch.load(file, weights_only=True, map_location=where)
        assert loaded["scale"].device == torch.device(where or fake)
        twin.load_state_dict(loaded)
        assert torch.equal(module.inner[0].weight, twin.inner[0].weight)
        assert twin.scale.tolist() == [2, 2, 2, 2]
    assert nn.Linear(2, 2, device="meta").to_empty(device=fake).weight.device == fake


def test_torch_knows_the_device(fake: torch.device) -> None:
    module = torch.get_device_module(fake)
    assert module.is_available()
    assert module.device_count() == torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator() == torch.device("kptfake")
    torch.accelerator.synchronize()
    torch.accelerator.synchronize(fake)
    assert torch.amp.is_autocast_available("kptfake")
    with torch.autocast("kptfake", dtype=torch.bfloat16):
        assert torch.get_autocast_dtype("kptfake") is torch.bfloat16
        assert (torch.ones(2, device=fake) * 2).tolist() == [2, 2]


def test_backward_on_the_second_device() -> None:
    x = torch.ones(2, device="kptfake:1", requires_grad=True)
    (x * x).sum().backward()
    assert x.grad.device == torch.device("kptfake:1")
    assert x.grad.tolist() == [2, 2]


def test_an_error_of_a_hook_is_told(fake: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.ones(2, device=fake, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: gradient * torch.ones(2))
    with pytest.raises(SystemError):
        y.sum().backward()
    assert "aten.mul.Tensor: expected every tensor on one device" in capsys.readouterr().err


def test_numbers_that_torch_makes_tensors_of(fake: torch.device) -> None:
    x = torch.arange(-3, 7, device=fake)
    assert torch.equal(x.remainder(4).cpu(), torch.arange(-3, 7).remainder(4))


def test_explain_works_and_shows_the_tree(fake: torch.device) -> None:
    table = case_tables()["moe.experts"]
    selection = kpt_core.explain("moe.experts", **table.arguments(table.cases[0], device=fake))
    assert (selection.device, selection.backend) == ("kptfake:0", "torch")
    assert "moe.grouped_mm" in {child.op for child in selection.children}
