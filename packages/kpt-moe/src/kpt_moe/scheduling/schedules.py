"""Schedules: what changes routers from step to step."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe._checks import require_number, require_size
from kpt_moe.router_losses import outer_routers
from kpt_moe.routers import Router


class Schedule(ABC):
    """What changes routers from step to step.

    Attributes:
        steps_done: calls of `step()` so far.
    """

    def __init__(self) -> None:
        self.steps_done = 0

    @abstractmethod
    def apply(self) -> None:
        """Bring the routers to where they should be after `steps_done` steps."""

    def step(self) -> None:
        """Go on by one step of the optimizer."""
        self.steps_done += 1
        self.apply()

    def state_dict(self) -> dict[str, int]:
        """What `load_state_dict` takes: `steps_done`; all else follows from it and the arguments."""
        return {"steps_done": self.steps_done}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to where another schedule of the same arguments was, its routers included.

        Raises:
            InputError: no `steps_done` that is a number of steps.
        """
        steps = state.get("steps_done")
        if not isinstance(steps, int) or steps < 0:
            raise InputError(f"{type(self).__name__}: steps_done must be an integer of at least 0; got {steps!r}")
        self.steps_done = steps
        self.apply()


class CapacitySchedule(Schedule):
    """Take the capacity factor of routers evenly from one value to another.

    A generous capacity while routing is unbalanced drops few tokens; a tight one later saves time. Sets
    `capacity_factor` of every router that has one, at once and at each step.

    Args:
        start: factor before the first step.
        end: factor after `steps` steps and from then on.
        steps: how many.
        stages: change the factor this many times on the way, at equal distances, instead of at every step. Each value
            compiles the routers of a compiled model again, which torch does 8 times
            (`torch._dynamo.config.recompile_limit`) before it gives up: at most 7 then.

    Raises:
        InputError: no router has a capacity, a factor is not positive, or `steps` or `stages` is no positive integer.
    """

    def __init__(self, model: nn.Module, start: float, end: float, steps: int, *, stages: int | None = None) -> None:
        super().__init__()
        require_size("CapacitySchedule", "steps", steps)
        if stages is not None:
            require_size("CapacitySchedule", "stages", stages, steps, "steps")
        for name, factor in (("start", start), ("end", end)):
            require_number("CapacitySchedule", name, factor, "a positive number")
        self.start, self.end, self.steps = start, end, steps
        self.stages = steps if stages is None else stages
        self._routers = [r for r in outer_routers(model).values() if r.capacity_factor is not None]
        if not self._routers:
            raise InputError(
                "CapacitySchedule: no router of the model has a capacity: make one with capacity_factor, whatever it is"
            )
        self.apply()

    def apply(self) -> None:
        """Set `capacity_factor`."""
        done = min(self.steps_done, self.steps) * self.stages // self.steps / self.stages
        for router in self._routers:
            router.capacity_factor = (1 - done) * self.start + done * self.end


class ExpertDropout(Schedule):
    """In training, let each expert be chosen by no token for a step, with some probability.

    The tokens of a dropped expert go to the next best, so that experts learn to stand in for one another and the router
    does not settle on few. A dropped expert has the lowest logit, and the probabilities of the others sum to one, as if
    it did not exist; so nothing needs rescaling, and evaluation uses all experts. Which ones are dropped depends on
    `seed`, the step and the router's place among the model's alone: ranks agree, and a resumed run goes on alike.

    At least `top_k` experts remain, those of `ExpertWarmup` counted out, and with groups of experts enough in each
    group; so the probability is somewhat below `probability` where that is binding. To be made, stepped and loaded
    after the `ExpertWarmup` of the same model, and stepped after its `BiasBalancer`. Sets the routers' `dropped`.

    Args:
        probability: of each expert at each step; at least 0 and below 1.
        seed: of the choice.

    Raises:
        InputError: `probability` is out of range, or the model has no router.
    """

    def __init__(self, model: nn.Module, probability: float, *, seed: int = 0) -> None:
        super().__init__()
        require_number("ExpertDropout", "probability", probability, "at least 0 and below 1")
        require_size("ExpertDropout", "seed", seed, least=0)
        self.probability, self.seed = probability, seed
        self._routers = list(outer_routers(model).values())
        self.apply()

    def apply(self) -> None:
        """Set `dropped`."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.steps_done) % 2**63)
        for router in self._routers:
            chance = torch.rand(router.num_experts, generator=generator).to(_device(router))
            if router.unavailable is not None:
                chance = chance.masked_fill(router.unavailable, -1)
            groups, least = _groups(router)
            chance = chance.view(groups, -1)
            staying = chance.topk(least, dim=-1).values[:, -1:]
            _set(router, "dropped", ((chance < self.probability) & (chance < staying)).view(-1))


class ExpertWarmup(Schedule):
    """Begin with few experts, and let their number grow evenly.

    Early tokens then train few experts well instead of many badly. Experts open in the order of their ids (evenly over
    groups, where a router has such); those not open yet can't be chosen in evaluation either. Sets the routers'
    `unavailable`.

    Args:
        start: experts that can be chosen before the first step.
        steps: after how many steps all can.

    Raises:
        InputError: `start` is below what a token needs or above what the router has, or `steps` is no positive integer.
    """

    def __init__(self, model: nn.Module, start: int, steps: int) -> None:
        super().__init__()
        require_size("ExpertWarmup", "steps", steps)
        require_size("ExpertWarmup", "start", start)
        self.start, self.steps = start, steps
        self._routers = list(outer_routers(model).values())
        for router in self._routers:
            groups, least = _groups(router)
            if not groups * least <= start <= router.num_experts:
                raise InputError(
                    f"ExpertWarmup: start must be between {groups * least} and {router.num_experts} for {router}; "
                    f"got {start}"
                )
        self.apply()

    def apply(self) -> None:
        """Set `unavailable`."""
        for router in self._routers:
            experts, (groups, _) = router.num_experts, _groups(router)
            now = self.start + (experts - self.start) * min(self.steps_done, self.steps) // self.steps
            if now == experts:
                router.unavailable = None
                continue
            ids, size = torch.arange(experts, device=_device(router)), experts // groups
            _set(router, "unavailable", ids % size * groups + ids // size >= now)


def _groups(router: Router) -> tuple[int, int]:
    """Groups of experts, and how many experts each needs at least, so that a token finds `top_k` in its best groups."""
    groups, best = getattr(router, "num_groups", 1), getattr(router, "top_groups", 1)
    return groups, math.ceil(router.top_k / best)


def _device(router: Router) -> torch.device:
    return next((tensor.device for tensor in (*router.parameters(), *router.buffers())), torch.device("cpu"))


def _set(router: Router, name: str, value: Tensor) -> None:
    """Set a buffer, in place if it is there: a CUDA graph would be recorded again for another address."""
    present = getattr(router, name)
    if present is None:
        setattr(router, name, value)
    else:
        present.copy_(value)
