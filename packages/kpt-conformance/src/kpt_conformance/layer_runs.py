"""Making and running the layer of a case, and what is required of the results: parts of the checks in `layers`."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from kpt_core import FallbackWarning
from kpt_optimize.cases import LayerCase

CPU = torch.device("cpu")
META = torch.device("meta")
#: By dtype: (relative, absolute). Two devices may sum in another order, over some hundred numbers of magnitude one, and
#: what was made in float32 stays as exact as it was when it is converted to float64.
_TOLERANCES = {torch.float64: (1e-4, 1e-5), torch.float32: (1e-4, 1e-5), torch.bfloat16: (3e-2, 3e-2)}


@contextmanager
def told(case: LayerCase, done: str) -> Iterator[None]:
    """Any error is the layer's, and said to be; slowness on the fake device is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        try:
            yield
        except Exception as error:
            raise AssertionError(f"{case.name}: {done}: {type(error).__name__}: {error}") from error


def made(case: LayerCase, device: torch.device = CPU, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A new layer in eval mode; the seed decides its random numbers, the same on every device."""
    with told(case, f"make({device}, {dtype})"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return case.make(device, dtype).eval()


def changed(layer: nn.Module, by: float) -> nn.Module:
    """Add as much to every parameter, so that none has the value that it is made with."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.is_floating_point() and parameter.dtype.itemsize == 1:  # torch adds none in place
                parameter.copy_(parameter.float() + by)
            else:
                parameter.add_(by)
    return layer


def load(case: LayerCase, layer: nn.Module, state: dict[str, Any], done: str) -> None:
    """Load a state_dict, strictly."""
    with told(case, f"load_state_dict into a layer {done}"):
        layer.load_state_dict(state)


def moved(case: LayerCase, layer: nn.Module, to: torch.device | torch.dtype, done: str) -> nn.Module:
    """The layer itself, after `.to()`."""
    with told(case, done):
        return layer.to(to)


def _inputs(case: LayerCase, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

    given = case.inputs(torch.Generator().manual_seed(0))
    return tree_map_only(Tensor, place, given)  # type: ignore[no-any-return]


def run(
    case: LayerCase, layer: nn.Module, device: torch.device, done: str, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """The tensors of the result, without gradients."""
    with told(case, f"forward of a layer {done}"), torch.no_grad():
        outputs = _tensors(layer(*_inputs(case, device, dtype)))
    assert outputs, f"{case.name}: the result has no tensor that torch.utils._pytree finds; register its class there"
    return outputs


def run_exported(case: LayerCase, layer: nn.Module) -> list[Tensor]:
    """What the program of `torch.export` gives for the layer and its inputs, without gradients."""
    with told(case, "torch.export"), torch.no_grad():
        inputs = _inputs(case, CPU)
        return _tensors(torch.export.export(_Model(layer), inputs).module()(*inputs))


class _Model(nn.Module):
    """A model of one layer: torch 2.13 miscounts the buffers of the outermost module if one is None."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any) -> Any:
        return self.layer(*inputs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def gradients(
    case: LayerCase, layer: nn.Module, device: torch.device, done: str, calls: int = 1, times: int = 1
) -> list[Tensor]:
    """Of every parameter and floating input, after so many calls with so many backwards each."""
    with told(case, f"backward of a layer {done}"):
        inputs = _inputs(case, device)
        leaves = [tensor.requires_grad_() for tensor in _tensors(inputs) if tensor.is_floating_point()]
        parameters = {name: p for name, p in layer.named_parameters() if p.requires_grad}
        for _ in range(calls):
            outputs = [output for output in _tensors(layer(*inputs)) if output.requires_grad]
            assert outputs, "no output has a gradient"
            # The squares: a sum of normalised outputs is a constant.
            loss = torch.stack([output.float().square().sum() for output in outputs]).sum()
            for _ in range(times):
                loss.backward(retain_graph=True)
        missing = [name for name, parameter in parameters.items() if parameter.grad is None]
        assert not missing, f"no gradient for {', '.join(missing)}"
    return [leaf.grad for leaf in (*leaves, *parameters.values()) if leaf.grad is not None]


def require_all_on(case: LayerCase, layer: nn.Module, device: torch.device, done: str) -> None:
    """Parameters and buffers lie on the device."""
    for kind, named in (("parameter", layer.named_parameters()), ("buffer", layer.named_buffers())):
        for name, tensor in named:
            assert tensor.device == device, f"{case.name}: {done}: {kind} {name} is on {tensor.device}"


def require_same_form(case: LayerCase, got: list[Tensor], want: list[Tensor]) -> None:
    """Results on meta have the shapes and dtypes of the CPU's."""
    forms = [[(list(tensor.shape), tensor.dtype) for tensor in tensors] for tensors in (got, want)]
    assert forms[0] == forms[1], f"{case.name}: the result on meta is {forms[0]}; expected the CPU's {forms[1]}"
    stray = [tensor.device for tensor in got if not tensor.is_meta]
    assert not stray, f"{case.name}: a result of inputs on meta is on {stray[0]}"


def require_close(
    case: LayerCase,
    got: list[Tensor],
    want: list[Tensor],
    device: torch.device,
    done: str,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Results lie on the device, and are the CPU's up to rounding."""
    relative, absolute = _TOLERANCES[dtype]
    for index, tensor in enumerate(got):
        place = f"{case.name}: {done}: tensor {index} is on {tensor.device}; expected {device}"
        assert tensor.device == device, place
    _compare(case, [tensor.cpu() for tensor in got], want, done, relative, absolute)


def require_equal(case: LayerCase, got: list[Tensor], want: list[Tensor], done: str) -> None:
    """The same computation on the same device gives the same bits."""
    _compare(case, got, want, done, 0.0, 0.0)


def _compare(
    case: LayerCase, got: list[Tensor], want: list[Tensor], done: str, relative: float, absolute: float
) -> None:
    assert len(got) == len(want), f"{case.name}: {done}: {len(got)} tensors; expected {len(want)}"
    for index, (tensor, expected) in enumerate(zip(got, want, strict=True)):
        with told(case, f"{done}: tensor {index}"):
            torch.testing.assert_close(tensor, expected, rtol=relative, atol=absolute, equal_nan=True)
