"""Every check of layers finds the layer that breaks its rule, passes the one that doesn't, and the layers of KPT."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kpt_conformance.layers import LAYER_CHECKS
from kpt_optimize.cases import LayerCase, layer_cases


@dataclass(frozen=True)
class Size:
    size: int = 4


class Good(nn.Module):
    """Has what layers may have: parameters, a buffer, a cache made at the first call that is checked for its device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.randn(4, 4, **where))
        self.inner = nn.Sequential(nn.Linear(4, 4, **where), nn.Dropout(0.5))
        self.register_buffer("scale", torch.arange(1, 5, **where))
        self.cache: Tensor | None = None

    def constant(self, x: Tensor) -> Tensor:
        if self.cache is None or (self.cache.device, self.cache.dtype) != (x.device, x.dtype):
            self.cache = torch.linspace(0, 1, 4, device=x.device, dtype=x.dtype)
        return self.cache

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.weight) * self.scale + self.constant(x)


class PlainTensor(Good):
    """A tensor that is no buffer: `.to()` leaves it behind."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.shift = torch.ones(4, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class OnTheCpu(Good):
    """A factory without `device=`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.ones(4)


class MadeOnTheCpu(Good):
    """A buffer made without `device=`: `.to()` moves it, but a layer made elsewhere begins on two devices."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.register_buffer("shift", torch.ones(4, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class StaleCache(Good):
    """A cache made at the first call, for good."""

    def constant(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.linspace(0, 1, 4, device=x.device, dtype=x.dtype)
        return self.cache


class CacheByDeviceType(Good):
    """A cache that forgets that there may be two devices of a type."""

    def constant(self, x: Tensor) -> Tensor:
        if self.cache is None or (self.cache.device.type, self.cache.dtype) != (x.device.type, x.dtype):
            self.cache = torch.linspace(0, 1, 4, device=x.device, dtype=x.dtype)
        return self.cache


class CacheOfWeights(Good):
    """A product of the weights, kept although they may change."""

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None or self.cache.device != x.device:
            self.cache = self.weight.detach() * 2
        return super().forward(x) + x @ self.cache

    def constant(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


class ReadsValues(Good):
    """Has no result without values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.abs().max() > 0)


class Halved(Good):
    """Stays in float32 when converted."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class NotPersistent(Good):
    """What `to_empty` loses for ever."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.register_buffer("table", torch.ones(4, device=device, dtype=dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table


class LosesState(Good):
    """Leaves a parameter out of its state_dict, and doesn't miss it."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._register_state_dict_hook(lambda module, state, prefix, meta: state.__delitem__(prefix + "weight"))

    def load_state_dict(self, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({"weight": self.weight.detach(), **state}, *args, **kwargs)


class GrowsKeys(Good):
    """A buffer that comes into being at the first call."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "seen"):
            self.register_buffer("seen", torch.zeros((), device=x.device))
        return super().forward(x)


class StoresCode(Good):
    """Something in the state_dict that only unpickling gives back."""

    def get_extra_state(self) -> Any:
        return Size()

    def set_extra_state(self, state: Any) -> None:
        assert state == Size()


class SharedCopy(Good):
    """Computes with a tensor that copies have in common."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharedCopy":
        twin = SharedCopy(self.weight.device, self.weight.dtype)
        twin.load_state_dict(self.state_dict())
        twin.weight = self.weight
        return twin.eval()


class ComparesDevices(Good):
    """Takes `cuda` and `cuda:0` for two."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        if self.device.type == x.device.type != "cpu" and self.device != x.device:
            raise ValueError(f"made for {self.device}, called on {x.device}")
        return super().forward(x)


class AlwaysDrops(Good):
    """Draws random numbers in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, training=True)


class Deaf(Good):
    """Keeps the mode from a submodule."""

    def train(self, mode: bool = True) -> "Deaf":
        self.training = mode
        return self


class Detached(Good):
    """Gives a parameter no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x @ self.weight.detach()) * self.scale + self.constant(x)


class TimesOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.ones(4)


class GradientOnTheCpu(Good):
    """Computes its gradient with a tensor of the CPU; the forward is fine."""

    def forward(self, x: Tensor) -> Tensor:
        return TimesOne.apply(super().forward(x))


class FirstBackwardOnly(Good):
    """Gives another gradient each time."""

    def forward(self, x: Tensor) -> Tensor:
        result, self.calls = super().forward(x), 0
        if result.requires_grad:
            result.register_hook(self.forget)
        return result

    def forget(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient if self.calls == 1 else gradient * 0


class Unordered:
    """A configuration that is equal to nothing."""


class Unpicklable(Size):
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle this")


def case_of(layer: type[nn.Module], config: Callable[[], Any] | None = Size) -> LayerCase:
    return LayerCase(
        name=f"test.{layer.__name__}",
        make=layer,
        inputs=lambda generator: (torch.randn(3, 4, generator=generator),),
        config=config,
    )


MADE_ON_META, MOVED_TO_META = "runs when made on meta", "runs when moved to meta"
MADE, MOVED = "runs on a device when made there", "runs on a device when moved there"
GRADIENTS, AFTER_A_RUN = "gives gradients on a device", "takes everything along when moved after a run"
DTYPE, EMPTY = "follows a change of dtype", "loads into memory made from meta"
STATE, SAVED = "round-trips its state_dict", "is saved and loaded without unpickling code"
COPY, CONFIG = "is copied whole", "has a configuration that can be stored and compared"
INDEX, MODES = "knows that a device without index is the first", "trains and evaluates"
TWICE, EXPORTED = "goes backward twice", "is exported"

#: The layer, the rule that it breaks, and what has to be said of it.
BROKEN = [
    (OnTheCpu, MADE_ON_META, r"forward of a layer made on meta: RuntimeError"),
    (ReadsValues, MADE_ON_META, r"forward of a layer made on meta: "),
    (MadeOnTheCpu, MADE_ON_META, r"made on meta: buffer shift is on cpu"),
    (PlainTensor, MOVED_TO_META, r"moved to meta after no run on the CPU: RuntimeError"),
    (StaleCache, MOVED_TO_META, r"moved to meta after a run on the CPU: RuntimeError"),
    (OnTheCpu, MADE, r"made on kptfake:0: RuntimeError: aten\.mul\.Tensor: expected every tensor on one device.* cpu"),
    (MadeOnTheCpu, MADE, r"made on kptfake:0: buffer shift is on cpu"),
    (PlainTensor, MOVED, r"moved to kptfake:0: RuntimeError: aten\.add\.Tensor: .*other \[4\] on cpu"),
    (GradientOnTheCpu, GRADIENTS, r"backward of a layer moved to kptfake:0: RuntimeError: aten\.mul\.Tensor"),
    (Detached, GRADIENTS, r"no gradient for weight"),
    (StaleCache, AFTER_A_RUN, r"moved to kptfake:0 after a run elsewhere: RuntimeError: aten\.add\.Tensor.* cpu"),
    (CacheByDeviceType, AFTER_A_RUN, r"moved to kptfake:1 after a run elsewhere: .*kptfake:1 and kptfake:0"),
    (StaleCache, DTYPE, r"converted to torch\.bfloat16 after a run in float32: the output is torch\.float32"),
    (Halved, DTYPE, r"converted to torch\.float64 after a run in float32: the output is torch\.float32"),
    (NotPersistent, EMPTY, r"buffers that are not in the state_dict: table: .*not equal"),
    (PlainTensor, EMPTY, r"made on meta, `to_empty` and `load_state_dict`: RuntimeError: .*meta"),
    (LosesState, STATE, r"given the state_dict: tensor 0: AssertionError: Tensor-likes are not"),
    (GrowsKeys, STATE, r"the keys of state_dict were .* before a run and .*'seen'.* after"),
    (LosesState, SAVED, r"given the saved state_dict: tensor 0"),
    (StoresCode, SAVED, r"torch\.load with weights_only=True: UnpicklingError"),
    (SharedCopy, COPY, r"the original after deepcopy after no run and a change of the copy"),
    (CacheOfWeights, STATE, r"not equal"),
    (ComparesDevices, INDEX, r"made on kptfake, called on kptfake:0: ValueError"),
    (AlwaysDrops, MODES, r"in eval mode after train mode without a run: tensor 0"),
    (Deaf, MODES, r"train\(False\) does not reach inner, inner\.0, inner\.1"),
    (FirstBackwardOnly, TWICE, r"one call, two backwards"),
    (ReadsValues, EXPORTED, r"torch\.export: "),
]


@pytest.mark.parametrize(
    ("layer", "rule", "said"), [pytest.param(*row, id=f"{row[0].__name__}-{row[1]}") for row in BROKEN]
)
def test_a_broken_rule_is_found(layer: type[nn.Module], rule: str, said: str) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)test\.{layer.__name__}: .*{said}"):
        LAYER_CHECKS[rule](case_of(layer))


@pytest.mark.parametrize(
    ("config", "said"), [(Unordered, "a configuration made alike is not equal"), (Unpicklable, "cannot pickle this")]
)
def test_a_configuration_that_is_no_value_is_found(config: Callable[[], Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        LAYER_CHECKS[CONFIG](case_of(Good, config))


def test_every_rule_is_broken_by_some_layer() -> None:
    assert {rule for _, rule, _ in BROKEN} | {CONFIG} == set(LAYER_CHECKS)


@pytest.mark.parametrize("rule", LAYER_CHECKS)
def test_a_good_layer_passes(rule: str) -> None:
    LAYER_CHECKS[rule](case_of(Good))
    LAYER_CHECKS[rule](case_of(Good, None))


@pytest.mark.parametrize("rule", LAYER_CHECKS)
@pytest.mark.parametrize("name", sorted(layer_cases()))
def test_the_layers_of_kpt_pass(name: str, rule: str) -> None:
    LAYER_CHECKS[rule](layer_cases()[name])
