"""The losses of all routers of a model, collected while it runs."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch import distributed as dist

from kpt_core import InputError, KptWarning

from ._checks import require_known, require_number
from ._counting import Hooked
from ._recomputation import in_recomputation
from .losses import GlobalLoad, Score, entropy_loss, global_batch_loss, gshard_loss, sequence_loss, switch_loss, z_loss
from .routers import Router
from .routing import Routing

#: How the losses of routers become one: their mean, their sum (Switch, Megatron), or one loss of all tokens together
#: (transformers).
Reduction = Literal["mean", "sum", "pooled"]

#: The losses that `RouterLosses` weighs.
LOSSES: dict[str, Callable[..., Tensor]] = {
    "switch": switch_loss,
    "gshard": gshard_loss,
    "global_batch": global_batch_loss,
    "sequence": sequence_loss,
    "entropy": entropy_loss,
    "token_entropy": partial(entropy_loss, per_token=True),
    "z": z_loss,
}


def outer_routers(model: nn.Module) -> dict[str, Router]:
    """The routers of a model by path, without those that lie within another router.

    Raises:
        InputError: there is none.
    """
    found: dict[str, Router] = {}
    for path, module in model.named_modules():
        within = any(path.startswith(f"{outer}." if outer else "") for outer in found)
        if isinstance(module, Router) and not within:
            found[path] = module
    if not found:
        raise InputError(f"{type(model).__name__} has no module that is a kpt_moe.routers.Router")
    return found


class RouterLosses(Hooked):
    """Collect what the routers of a model decide, and give the weighted sum of their losses.

    Forward hooks collect, from construction on until `close`, or the end of a `with` block. Models under
    `torch.compile` need them before their first call. Activation checkpointing must be `use_reentrant=False`: what
    backward runs again is not collected.

    Every forward is followed by one `total()`, which forgets what it was made of, so that no graph is kept. Where
    `total()` was not called, the next forward forgets the last one, and warns. A forward under `torch.no_grad` counts
    only where there is no other:

        >>> losses = RouterLosses(model, switch=0.01, z=1e-3)
        >>> for batch in micro_batches:
        ...     loss = task_loss(model(batch)) + losses.total()
        ...     (loss / len(micro_batches)).backward()
        >>> optimizer.step()
        >>> losses.step()

    Args:
        score: as in the losses.
        reduction: `mean` over the calls of routers in the last forward, their `sum`, or `pooled`: the tokens of all
            calls together, as transformers does.
        group: the data-parallel ranks, see `kpt_moe.losses`; `global_batch_loss` counts over them. Every rank must
            then run as many routers.
        training_only: leave alone what routers decide outside of training.
        weights: of the losses, by their names without `_loss`: `switch`, `gshard`, `entropy`, `z`; `global_batch`,
            counted for each router by itself, or for all if `pooled`; `sequence`, for which `total` needs `cu_seqlens`
            or `batch_size`; and `token_entropy`, which is `entropy_loss(per_token=True)`.

    Raises:
        InputError: the model has no router, no weight is other than zero, or one is no finite number.
        UnknownNameError: no such `reduction` or loss.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        score: Score | None = None,
        reduction: Reduction = "mean",
        group: dist.ProcessGroup | None = None,
        training_only: bool = True,
        **weights: float,
    ) -> None:
        for name in weights:
            require_known("loss", name, LOSSES)
            require_number("RouterLosses", name, weights[name])
        if not any(weights.values()):
            raise InputError(f"RouterLosses: one of the weights must be other than zero; got {weights}")
        require_known("reduction", reduction, get_args(Reduction))
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.score = score
        self.reduction: Reduction = reduction
        self.group = group
        self.training_only = training_only
        self._routers = outer_routers(model)
        self._loads: dict[str, GlobalLoad] = {}
        self._calls: list[tuple[str, Routing] | None] = []  # None where a forward begins
        self._values: dict[str, Tensor] = {}
        self._handles = [model.register_forward_pre_hook(self._begin)]
        self._handles += [
            router.register_forward_hook(partial(self._collect, path)) for path, router in self._routers.items()
        ]

    def total(self, *, cu_seqlens: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """The weighted sum of the losses of what routers decided in the last forward, 0-d.

        Args:
            cu_seqlens: for `sequence_loss`.
            batch_size: likewise.

        Raises:
            InputError: no router has run, or one ran without gradients while it was training (under `torch.no_grad`, or
                reentrant checkpointing), or as in the losses.
        """
        calls = self._newest()
        self._check(calls)
        batches = [(path, [routing]) for path, routing in calls]
        if self.reduction == "pooled":
            batches = [(calls[0][0], [routing for _, routing in calls])]
        device = calls[0][1].logits.device
        total, values = torch.zeros((), device=device), {}
        for name, weight in self.weights.items():
            parts = [self._loss(name, path, batch, cu_seqlens, batch_size).to(device) for path, batch in batches]
            part = torch.stack(parts).sum() if self.reduction == "sum" else torch.stack(parts).mean()
            values[name] = part.detach()
            total = total + weight * part
        self._values = values
        if total.requires_grad and not torch.compiler.is_compiling():
            total.register_hook(self._collect_nothing)
        return total

    def values(self) -> dict[str, Tensor]:
        """The parts of the last `total()` by name, without their weights and without gradients, on their device."""
        return dict(self._values)

    def step(self) -> None:
        """Begin a new global batch: for after each step of the optimizer; `global_batch_loss` alone needs it."""
        self._loads.clear()

    def detach(self) -> None:
        """Collect no more, and forget what was collected. Doing it twice does no harm."""
        super().detach()
        self._calls.clear()

    close = detach

    def _begin(self, model: nn.Module, args: Any) -> None:
        """Note that a forward begins, and forget the one before, which `total()` should have taken.

        Compiled code can't tell whether it repeats one for a backward, so that `total()` forgets it there.
        """
        if not torch.compiler.is_compiling() and not in_recomputation():
            learned = [call for call in self._calls if call is not None and call[1].logits.requires_grad]
            if torch.is_grad_enabled() and learned:
                self._warn()
            self._calls = [] if torch.is_grad_enabled() else list(learned)
        if not in_recomputation():
            self._calls.append(None)

    def _newest(self) -> list[tuple[str, Routing]]:
        """Take what the last forward collected; with gradients, the last one that has some, if any has."""
        forwards: list[list[tuple[str, Routing]]] = [[]]
        for call in self._calls:
            if call is None:
                forwards.append([])
            else:
                forwards[-1].append(call)
        self._calls = []
        forwards = [calls for calls in forwards if calls]
        if torch.is_grad_enabled():
            learned = [calls for calls in forwards if any(routing.logits.requires_grad for _, routing in calls)]
            if len(learned) > 1 and not torch.compiler.is_compiling():
                self._warn()
            forwards = learned or forwards
        return forwards[-1] if forwards else []

    def _warn(self) -> None:
        warnings.warn(
            "RouterLosses: the model ran again before total(), so the losses of the forward before are lost: call "
            "total() once after each forward, or close() where there is none",
            KptWarning,
            stacklevel=3,
        )

    def _collect(self, path: str, router: nn.Module, args: Any, routing: Routing) -> None:
        if (router.training or not self.training_only) and not in_recomputation():
            self._calls.append((path, routing))

    def _collect_nothing(self, grad: Tensor) -> None:
        """Forget what is collected from now to the end of this backward.

        It is what checkpointing repeats: compiled code can't tell that, eager code does.
        """
        before = len(self._calls)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._calls.__delitem__(slice(before, None)))

    def _check(self, calls: Sequence[tuple[str, Routing]]) -> None:
        if not calls:
            mode = " in training mode" if self.training_only else ""
            raise InputError(
                f"RouterLosses: no router ran{mode} since the last total(): call it once after each forward; of a "
                "compiled model, make RouterLosses before its first call"
            )
        for path, routing in calls:
            router = self._routers[path]
            learns = router.training and any(parameter.requires_grad for parameter in router.parameters())
            if torch.is_grad_enabled() and learns and not routing.logits.requires_grad:
                raise InputError(
                    f"RouterLosses: router {path!r} is training, but ran without gradients, so its losses would train "
                    "nothing: run it outside of torch.no_grad, and checkpoint with use_reentrant=False"
                )

    def _loss(
        self, name: str, path: str, batch: list[Routing], cu_seqlens: Tensor | None, batch_size: int | None
    ) -> Tensor:
        options: dict[str, Any] = {} if name == "z" else {"score": self.score}
        if name == "global_batch":
            options["load"] = self._loads.setdefault("" if self.reduction == "pooled" else path, GlobalLoad(self.group))
        else:
            options["group"] = self.group
        if name == "sequence":
            options |= {"cu_seqlens": cu_seqlens, "batch_size": batch_size}
        return LOSSES[name](batch, **options)
