"""What the simulator knows of a cluster and of one layer's experts."""

import math
from dataclasses import dataclass, fields
from typing import Any

from kpt_core import InputError
from kpt_moe._checks import require_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """How fast rows travel between ranks: an alpha-beta model with two classes of links.

    A message of `n` bytes takes `latency + n / bandwidth`. A rank sends its messages of one class one after the other;
    receiving runs beside sending, and the links within a node beside those between nodes. What a rank sends to itself
    is free. An exchange is over when its slowest rank is.

    What the model leaves out: contention in switches and between the ranks of a node (each has its own network card
    here), bandwidth that depends on the message size, packing rows and launching kernels, the exchange of counts that
    precedes each dispatch, and compute that gets slower while rows travel. Its bandwidths are those that an all-to-all
    reaches in your cluster, which are below a data sheet's: measure them.

    Attributes:
        ranks: of the group that shares the experts; ranks of a node are numbered one after the other.
        ranks_per_node: divides `ranks`.
        intra_bandwidth: bytes per second that a rank sends within its node, in one direction; may be infinite.
        inter_bandwidth: the same between nodes.
        intra_latency: seconds per message within a node.
        inter_latency: the same between nodes.

    Raises:
        InputError: a number is out of range, or `ranks_per_node` does not divide `ranks`.
    """

    ranks: int
    ranks_per_node: int
    intra_bandwidth: float
    inter_bandwidth: float
    intra_latency: float = 0.0
    inter_latency: float = 0.0

    def __post_init__(self) -> None:
        require_size("Links", "ranks", self.ranks)
        require_size("Links", "ranks_per_node", self.ranks_per_node, self.ranks, "ranks")
        if self.ranks % self.ranks_per_node:
            raise InputError(
                f"Links: ranks_per_node ({self.ranks_per_node}) must divide ranks ({self.ranks}): nodes are alike"
            )
        _require_positive(self, "intra_bandwidth", "inter_bandwidth")
        _require_duration(self, "intra_latency", "inter_latency")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCost:
    """What one row costs at one expert, and on its way there.

    An expert with `n` rows takes the longer of `n * flops_per_row / flops_per_second` and the time to read its weights;
    without rows it takes none. The experts of a rank run one after the other. This leaves out that small products reach
    a lower rate than large ones: take the rate of products of your size.

    Attributes:
        flops_per_row: of one expert for one row.
        flops_per_second: that a rank reaches in these products; may be infinite.
        row_bytes: of a row on its way to a rank: its hidden state, expert ids and weights.
        answer_bytes: of a row on its way back.
        weight_bytes: of one expert.
        memory_bandwidth: bytes per second at which a rank reads weights; infinite leaves the reading out.

    Raises:
        InputError: a number is negative, or a rate is zero.
    """

    flops_per_row: float
    flops_per_second: float
    row_bytes: float
    answer_bytes: float
    weight_bytes: float = 0.0
    memory_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        _require_positive(self, "flops_per_second", "memory_bandwidth")
        _require_duration(self, *(field.name for field in fields(self) if field.name not in _RATES))

    @staticmethod
    def feed_forward(
        hidden_size: int,
        intermediate_size: int,
        *,
        top_k: int,
        flops_per_second: float,
        memory_bandwidth: float = math.inf,
        gated: bool = True,
        bytes_per_element: float = 2,
    ) -> "ExpertCost":
        """Of the forward pass of a feed-forward expert, sent as `kpt_moe.parallel.dispatch` does.

        A row travels with `top_k` ids of 8 bytes and as many weights of 4. Backward sends rows of the same number again
        in both directions and computes twice as much.

        Args:
            hidden_size: of a token.
            intermediate_size: of an expert.
            top_k: experts per token.
            flops_per_second: as above.
            memory_bandwidth: as above.
            gated: whether there are three matrices (SwiGLU) or two.
            bytes_per_element: of hidden states and weights; 2 is bfloat16.
        """
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size), ("top_k", top_k)):
            require_size("ExpertCost", name, size)
        parameters = (3 if gated else 2) * hidden_size * intermediate_size
        return ExpertCost(
            flops_per_row=2.0 * parameters,
            flops_per_second=flops_per_second,
            row_bytes=hidden_size * bytes_per_element + 12 * top_k,
            answer_bytes=hidden_size * bytes_per_element,
            weight_bytes=parameters * bytes_per_element,
            memory_bandwidth=memory_bandwidth,
        )


_RATES = ("flops_per_second", "memory_bandwidth")


def _require_positive(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not value > 0:
            raise InputError(f"{type(owner).__name__}: {name} must be above 0 (math.inf for no limit); got {value!r}")


def _require_duration(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not 0 <= value < math.inf:
            raise InputError(f"{type(owner).__name__}: {name} must be finite and not negative; got {value!r}")
