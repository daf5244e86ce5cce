"""How fast a model reads a prompt and writes after it, through `generate`, as its user would run it."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

from torch import Tensor

from kpt_cli.plain_pytorch import plain_pytorch

from .comparison import Comparison, of_times

#: Called with (rounds done, rounds in all).
OnRound = Callable[[int, int], None]
#: How often the rounds are run at most.
MOST = 3
_Contestant = Literal["before", "plain", "after"]


class Clock:
    """A streamer of `generate` that notes when each token arrives; the prompt arrives first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        """Note the time; the token is on the host, so its computation is over."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to be done."""

    @property
    def prefill(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def decode(self) -> float:
        """Seconds from the first token to the last."""
        return self.times[-1] - self.times[1]


def generate_timed(model: Any, prompt: Tensor, new_tokens: int) -> Clock:
    """Generate exactly `new_tokens` greedily."""
    from transformers import GenerationConfig

    make: Any = GenerationConfig
    # Token 0 ends a file; min_new_tokens keeps it from ending a measurement.
    config = make(max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, eos_token_id=0, pad_token_id=0)
    clock = Clock()
    model.generate(prompt, streamer=clock, generation_config=config)
    return clock


def compare_speed(
    before: Any, after: Any, prompt: Tensor, new_tokens: int, rounds: int, on_round: OnRound
) -> tuple[list[Comparison], list[Comparison]]:
    """Time two models in turn, so that a change of the machine's load meets both, and the second in plain PyTorch too.

    Args:
        before: the model as it was.
        after: the model with the plan applied.
        prompt: `[1, tokens]`.
        new_tokens: to generate after it.
        rounds: of each model; one more is run first and not counted. While the gains are not known to a tenth, as many
            more are run, up to `MOST` times.
        on_round: is told how it goes.

    Returns:
        The second model beside the first, and beside itself without the kernels of a vendor's backend.
    """

    def beside(other: _Contestant) -> list[Comparison]:
        old, new = clocks[other], clocks["after"]
        return [
            of_times("prefill", prompt.numel(), [c.prefill for c in old], [c.prefill for c in new]),
            of_times("decode", new_tokens - 1, [c.decode for c in old], [c.decode for c in new]),
        ]

    order: list[_Contestant] = ["before", "plain", "after"]
    clocks: dict[_Contestant, list[Clock]] = {name: [] for name in order}
    last = MOST * rounds
    for turn in range(-1, last):
        on_round(turn + 1, last + 1)
        if turn > 0 and turn % rounds == 0 and all(comparison.settled for comparison in beside("before")):
            break
        # Who goes first alternates, since the second finds a warmer machine.
        for name in order if turn % 2 else reversed(order):
            with plain_pytorch() if name == "plain" else nullcontext():
                clock = generate_timed(before if name == "before" else after, prompt, new_tokens)
            if turn >= 0:
                clocks[name].append(clock)
    on_round(last + 1, last + 1)
    return beside("before"), beside("plain")
