"""Training memory: experts recompute their activations in backward, or keep them on the host."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from kpt_core import InputError
from kpt_moe._checks import require_known
from kpt_moe._mixed import Mixed, mixed
from kpt_moe.batch_invariant import MODE, batch_invariant
from kpt_moe.expert_networks import ExpertNetwork
from kpt_moe.hf_modules import is_transformers_experts

from .offloaded_experts import OffloadedExperts


class _Recomputing(Mixed):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run: Callable[..., Any] = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        if MODE.on and not torch.compiler.is_compiling():
            # The recomputation may be outside of the block, or in another thread.
            run = batch_invariant()(run)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)


class _Offloading(Mixed):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _saved_on_host(self) if torch.is_grad_enabled() else nullcontext():  # type: ignore[arg-type]
            return super().forward(*args, **kwargs)  # type: ignore[misc]


#: `recompute` saves an expert module's arguments alone and runs it again in backward; `offload` saves on the host.
MODES: dict[str, type[Mixed]] = {"recompute": _Recomputing, "offload": _Offloading}


class CheckpointedExperts:
    """Modules of experts that save less.

    Attributes:
        mode: one of `MODES`.
        paths: of the modules.
    """

    def __init__(self, mode: str, modules: dict[str, nn.Module]) -> None:
        self.mode, self.paths = mode, tuple(modules)
        self._modules = list(modules.values())

    def restore(self) -> None:
        """Let the modules save as before; a second time does nothing."""
        for module in self._modules:
            if isinstance(module, tuple(MODES.values())):
                module.__class__ = type(module).__bases__[1]


def checkpoint_experts(model: nn.Module, mode: str = "recompute") -> CheckpointedExperts:
    """Save less for the backward pass of experts, and of nothing else in the model.

    Routers run once: what they decided is an argument of the experts, so a recomputation cannot route differently.
    Gradients are the same to the bit wherever the experts compute the same twice. Weights must stay as they are from
    forward to backward: `offload` raises where they changed, as torch does; `recompute` can't tell.

    With `recompute` (activation checkpointing, arXiv:1604.06174) a module's arguments are kept, and its forward runs
    again in backward, under autocast and in `batch_invariant()` if it did so at first. With `offload` everything that
    it saves but its own parameters is copied to the host, and back in backward; on the CPU that gains nothing, and
    `torch.compile` runs such a module uncompiled.

    Args:
        model: changed in place: the class of each experts module, KPT's or transformers', becomes a subclass of it.
            Names of parameters, the state dict, copies and pickles stay what they were.
        mode: `recompute` or `offload`.

    Returns:
        The handle, with `restore()`.

    Raises:
        UnknownNameError: no such mode.
        InputError: the model has no experts, or they are checkpointed or offloaded already.
    """
    require_known("mode", mode, MODES)
    found = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, ExpertNetwork | OffloadedExperts) or is_transformers_experts(module)
    }
    if not found:
        raise InputError(
            f"{type(model).__name__} has no experts: neither networks of KPT's layers nor experts modules of "
            "transformers"
        )
    for path, module in found.items():
        if isinstance(module, (*MODES.values(), OffloadedExperts)):
            state = "offloaded" if isinstance(module, OffloadedExperts) else "checkpointed"
            raise InputError(f"{path or type(model).__name__} is {state} already: restore() it first")
    for module in found.values():
        module.__class__ = mixed(MODES[mode], type(module))
    return CheckpointedExperts(mode, found)


def _saved_on_host(module: nn.Module) -> AbstractContextManager[Any]:
    """As `torch.autograd.graph.save_on_cpu`, but that the module's parameters stay where they are."""
    # Of spread ones (DTensors), what is here.
    here = (parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in module.parameters())
    parameters = {parameter.untyped_storage()._cdata for parameter in here}

    def pack(tensor: Tensor) -> tuple[torch.device | int, Tensor]:
        if tensor.untyped_storage()._cdata in parameters:
            # Torch asks for the version of what it saves itself, and not of what a hook saves.
            return tensor._version, tensor
        # A copy on the CPU too: a tensor saved as it is would not be missed if someone changed it before backward.
        pin = tensor.device.type not in ("cpu", "meta")
        host = torch.empty_like(tensor, device="cpu", pin_memory=pin)
        return tensor.device, host.copy_(tensor, non_blocking=pin)

    def unpack(saved: tuple[torch.device | int, Tensor]) -> Tensor:
        before, tensor = saved
        if not isinstance(before, int):
            return tensor.to(before, non_blocking=True, copy=True)
        if tensor._version != before:
            raise InputError(
                f"{type(module).__name__}: a weight {list(tensor.shape)} was changed in place between forward and "
                "backward, whose gradients would be of neither: run backward before the optimizer's step"
            )
        return tensor

    return saved_tensors_hooks(pack, unpack)
