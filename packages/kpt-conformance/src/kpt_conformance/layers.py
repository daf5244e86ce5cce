"""What every layer must do: be at home on any device, and take with it whatever it will ever touch.

Each check takes a `kpt_optimize.cases.LayerCase` and raises `AssertionError` with what was done and expected. Checks
on a device use the fake one (`kpt_conformance.fake_device`), which stays in the process once a check has run.
"""

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from kpt_core import FallbackWarning
from kpt_optimize.cases import LayerCase

from . import fake_device

CPU = torch.device("cpu")
META = torch.device("meta")
_NEW = "made on the CPU"
#: By dtype: (relative, absolute). Two devices may sum in another order, over some hundred numbers of magnitude one, and
#: what was made in float32 stays as exact as it was when it is converted to float64.
_TOLERANCES = {torch.float64: (1e-4, 1e-5), torch.float32: (1e-4, 1e-5), torch.bfloat16: (3e-2, 3e-2)}

LayerCheck = Callable[[LayerCase], None]

#: By the rule that a check holds layers to.
LAYER_CHECKS: dict[str, LayerCheck] = {}


def _rule(name: str) -> Callable[[LayerCheck], LayerCheck]:
    def enter(check: LayerCheck) -> LayerCheck:
        LAYER_CHECKS[name] = check
        return check

    return enter


@contextmanager
def told(case: LayerCase, done: str) -> Iterator[None]:
    """Turn any error into one of the layer; slowness on the fake device is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        try:
            yield
        except Exception as error:
            raise AssertionError(f"{case.name}: {done}: {type(error).__name__}: {error}") from error


def made(case: LayerCase, device: torch.device = CPU, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Return a new layer in eval mode; the seed decides its random numbers, the same on every device."""
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
    """Return the layer itself, after `.to()`."""
    with told(case, done):
        return layer.to(to)


def _inputs(case: LayerCase, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else tensor.dtype)

    given = case.inputs(torch.Generator().manual_seed(0))
    return tree_map_only(Tensor, place, given)  # type: ignore[no-any-return]


def run(
    case: LayerCase, layer: nn.Module, device: torch.device = CPU, done: str = _NEW, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return the tensors of the result, without gradients."""
    with told(case, f"forward of a layer {done}"), torch.no_grad():
        outputs = _tensors(layer(*_inputs(case, device, dtype)))
    assert outputs, f"{case.name}: the result has no tensor that torch.utils._pytree finds; register its class there"
    return outputs


def run_exported(case: LayerCase, layer: nn.Module) -> list[Tensor]:
    """Return what the program of `torch.export` gives for the layer and its inputs, without gradients."""
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
    """Return those of every parameter and floating input, after so many calls with so many backwards each."""
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
    """Raise `AssertionError` unless parameters and buffers lie on the device."""
    for kind, named in (("parameter", layer.named_parameters()), ("buffer", layer.named_buffers())):
        for name, tensor in named:
            assert tensor.device == device, f"{case.name}: {done}: {kind} {name} is on {tensor.device}"


def require_same_form(case: LayerCase, got: list[Tensor], want: list[Tensor]) -> None:
    """Raise `AssertionError` unless results on meta have the shapes and dtypes of the CPU's."""
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
    """Raise `AssertionError` unless results lie on the device, and are the CPU's up to rounding."""
    for index, tensor in enumerate(got):
        place = f"{case.name}: {done}: tensor {index} is on {tensor.device}; expected {device}"
        assert tensor.device == device, place
    require_equal(case, [tensor.cpu() for tensor in got], want, done, _TOLERANCES[dtype])


def require_equal(
    case: LayerCase, got: list[Tensor], want: list[Tensor], done: str, tolerance: tuple[float, float] = (0.0, 0.0)
) -> None:
    """Raise `AssertionError` unless results are equal: of one computation on one device, in every bit."""
    assert len(got) == len(want), f"{case.name}: {done}: {len(got)} tensors; expected {len(want)}"
    for index, (tensor, expected) in enumerate(zip(got, want, strict=True)):
        with told(case, f"{done}: tensor {index}"):
            torch.testing.assert_close(tensor, expected, rtol=tolerance[0], atol=tolerance[1], equal_nan=True)


@_rule("runs when made on meta")
def made_on_meta(case: LayerCase) -> None:
    """A layer made on meta lies there, and runs: shapes and dtypes are the CPU's."""
    layer = made(case, META)
    require_all_on(case, layer, META, "made on meta")
    require_same_form(case, run(case, layer, META, "made on meta"), run(case, made(case)))


@_rule("runs when moved to meta")
def moved_to_meta(case: LayerCase) -> None:
    """A layer moved to meta, before it ran and after, runs there."""
    want = run(case, made(case))
    for has_run in (False, True):
        layer = made(case)
        if has_run:
            run(case, layer)
        done = f"moved to meta after {'a run' if has_run else 'no run'} on the CPU"
        moved(case, layer, META, done)
        require_all_on(case, layer, META, done)
        require_same_form(case, run(case, layer, META, done), want)


@_rule("runs on a device when made there")
def made_on_a_device(case: LayerCase) -> None:
    """A layer made on a device, given the parameters of the CPU's, computes what that one does."""
    device, origin = fake_device.enable(), made(case)
    layer = made(case, device)
    done = f"made on {device}"
    require_all_on(case, layer, device, done)
    load(case, layer, origin.state_dict(), done)
    require_close(case, run(case, layer, device, done), run(case, origin), device, done)


@_rule("runs on a device when moved there")
def moved_to_a_device(case: LayerCase) -> None:
    """A layer moved from the CPU computes there what it did."""
    device, layer = fake_device.enable(), made(case)
    want = run(case, made(case))
    done = f"moved to {device}"
    moved(case, layer, device, done)
    require_all_on(case, layer, device, done)
    require_close(case, run(case, layer, device, done), want, device, done)


@_rule("gives gradients on a device")
def gradients_on_a_device(case: LayerCase) -> None:
    """Gradients of parameters and inputs lie on the device, and are the CPU's."""
    device = fake_device.enable()
    want = gradients(case, made(case), CPU, _NEW)
    done = f"moved to {device}"
    layer = moved(case, made(case), device, done)
    require_close(case, gradients(case, layer, device, done), want, device, f"gradients, {done}")


@_rule("takes everything along when moved after a run")
def moved_after_a_run(case: LayerCase) -> None:
    """What a layer made for itself while it ran follows it: to a device, to another one of the same type, and back."""
    first, layer = fake_device.enable(), made(case)
    want = run(case, layer)
    for device in (first, torch.device(first.type, 1), CPU):
        done = f"moved to {device} after a run elsewhere"
        moved(case, layer, device, done)
        require_all_on(case, layer, device, done)
        require_close(case, run(case, layer, device, done), want, device, done)


@_rule("follows a change of dtype")
def dtype_follows(case: LayerCase) -> None:
    """A layer that ran in float32 and is converted computes as one that was made in the new dtype."""
    for dtype in (torch.float64, torch.bfloat16):
        origin, layer = made(case), made(case)
        run(case, layer, CPU, "made in float32")
        done = f"converted to {dtype} after a run in float32"
        moved(case, layer, dtype, done)
        made_so = made(case, dtype=dtype)
        load(case, made_so, origin.state_dict(), f"made in {dtype}")
        got = run(case, layer, CPU, done, dtype)
        want = run(case, made_so, CPU, f"made in {dtype}", dtype)
        if len(got) == 1 and got[0].is_floating_point():
            assert got[0].dtype is dtype, f"{case.name}: {done}: the output is {got[0].dtype}; expected {dtype}"
        require_close(case, got, want, CPU, done, dtype)


@_rule("loads into memory made from meta")
def empty_from_meta(case: LayerCase) -> None:
    """`to_empty` from meta and `load_state_dict` give the layer whose state it was; all else was lost."""
    origin = changed(made(case), 0.1)
    layer = made(case, META).to_empty(device=CPU)
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            # What `to_empty` gives may be the right values by chance.
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
    load(case, layer, origin.state_dict(), "made on meta")
    done = "made on meta, `to_empty` and `load_state_dict`"
    lost = sorted({name for name, _ in layer.named_buffers()} - set(layer.state_dict()))
    hint = f"; buffers that are not in the state_dict: {', '.join(lost)}" if lost else ""
    require_equal(case, run(case, layer, CPU, done), run(case, origin), done + hint)


@_rule("round-trips its state_dict")
def state_dict_round_trips(case: LayerCase) -> None:
    """Another layer with its state_dict is the same layer, and running changes no key."""
    origin = changed(made(case), 0.1)
    keys = list(origin.state_dict())
    want = run(case, origin)
    ran = list(origin.state_dict())
    assert ran == keys, f"{case.name}: the keys of state_dict were {keys} before a run and {ran} after"
    layer = made(case, seed=1)
    other = list(layer.state_dict())
    assert other == keys, f"{case.name}: two layers have different keys of state_dict, {keys} and {other}"
    run(case, layer, CPU, "made with another seed")
    load(case, layer, origin.state_dict(), "made with another seed")
    done = "made with another seed, run and given the state_dict"
    require_equal(case, run(case, layer, CPU, done), want, done)


@_rule("is saved and loaded without unpickling code")
def saved_and_loaded(case: LayerCase) -> None:
    """`torch.save` of the state_dict, loaded with `weights_only=True`, gives the same layer."""
    origin, file = changed(made(case), 0.1), io.BytesIO()
    with told(case, "torch.save of the state_dict, then torch.load with weights_only=True"):
        torch.save(origin.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    layer = made(case, seed=1)
    load(case, layer, state, "made with another seed")
    done = "given the saved state_dict"
    require_equal(case, run(case, layer, CPU, done), run(case, origin), done)


@_rule("is copied whole")
def deepcopy_is_independent(case: LayerCase) -> None:
    """`deepcopy`, before a run and after, computes the same; a change of either is none of the other."""
    for has_run in (False, True):
        origin = made(case)
        if has_run:
            run(case, origin)
        done = f"deepcopy after {'a run' if has_run else 'no run'}"
        with told(case, done):
            twin = copy.deepcopy(origin)
        want = run(case, origin)
        require_equal(case, run(case, twin, CPU, done), want, done)
        changed(twin, 1.0)
        require_equal(case, run(case, origin, CPU, done), want, f"the original after {done} and a change of the copy")
        twin = copy.deepcopy(origin)
        changed(origin, 1.0)
        require_equal(case, run(case, twin, CPU, done), want, f"{done} and a change of the original")


@_rule("has a configuration that can be stored and compared")
def config_is_a_value(case: LayerCase) -> None:
    """The configuration equals one made alike, a pickled one and a copied one."""
    if case.config is None:
        return
    config = case.config()
    with told(case, "pickling the configuration"):
        pickled = pickle.loads(pickle.dumps(config))
    for kind, other in (("made alike", case.config()), ("pickled", pickled), ("copied", copy.deepcopy(config))):
        assert other == config, f"{case.name}: a configuration {kind} is not equal: {other!r}; expected {config!r}"


@_rule("knows that a device without index is the first")
def device_without_index(case: LayerCase) -> None:
    """A layer made on, or moved to, `cuda` takes tensors of `cuda:0`."""
    device = fake_device.enable()
    bare = torch.device(device.type)
    for done, layer in (
        (f"made on {bare}", made(case, bare)),
        (f"moved to {bare}", moved(case, made(case), bare, f"moved to {bare}")),
    ):
        require_all_on(case, layer, device, done)
        for output in run(case, layer, device, f"{done}, called on {device}"):
            assert output.device == device, f"{case.name}: {done}: the output is on {output.device}; expected {device}"


@_rule("is exported")
def exported(case: LayerCase) -> None:
    """`torch.export` takes the layer whole, and the program computes what the layer does."""
    layer = made(case)
    want = run(case, layer)
    require_close(case, run_exported(case, layer), want, CPU, "exported")


@_rule("trains and evaluates")
def train_and_eval(case: LayerCase) -> None:
    """The mode reaches every submodule and alone changes nothing; evaluating gives the same each time."""
    layer = made(case)
    want = run(case, layer, CPU, "in eval mode")
    for mode in (True, False):
        layer.train(mode)
        deaf = [name or "itself" for name, module in layer.named_modules() if module.training is not mode]
        assert not deaf, f"{case.name}: train({mode}) does not reach {', '.join(deaf)}"
    require_equal(case, run(case, layer, CPU, "in eval mode"), want, "in eval mode after train mode without a run")
    run(case, layer.train(), CPU, "in train mode")
    want = run(case, layer.eval(), CPU, "in eval mode after a run in train mode")
    require_equal(case, run(case, layer, CPU, "in eval mode"), want, "in eval mode again")


@_rule("goes backward twice")
def backward_twice(case: LayerCase) -> None:
    """Gradients of two calls add up, and those of one call can be asked for twice."""
    once = gradients(case, made(case), CPU, "backward")
    for done, calls, times in (("two calls, a backward each", 2, 1), ("one call, two backwards", 1, 2)):
        twice = gradients(case, made(case), CPU, done, calls, times)
        require_close(case, twice, [2 * gradient for gradient in once], CPU, f"the sum of gradients of {done}")
