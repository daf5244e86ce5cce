"""Which rank should hold which expert: plans from recorded loads, and predictions of what they gain.

`plan_placement` gives the experts of each layer to ranks, with replicas of the hottest. `simulate` predicts how long
dispatch, compute and combine of expert parallelism take under a placement. `python -m kpt_moe.placement` does both.

Predictions follow from the formulas in `Links` and `ExpertCost`. They were not compared with any real cluster: trust
their order more than their seconds, and measure before relying on either.
"""

from .links import ExpertCost, Links
from .placement import Placement, contiguous_placement
from .planner import plan_placement
from .simulator import LayerReport, Report, simulate

__all__ = [
    "ExpertCost",
    "LayerReport",
    "Links",
    "Placement",
    "Report",
    "contiguous_placement",
    "plan_placement",
    "simulate",
]
