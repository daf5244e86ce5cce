"""Experts over the course of training: their capacity, which of them may be chosen, and what becomes of idle ones.

Everything here changes routers between steps, never within one: call `step()` once after each step of the optimizer.
On a model under `torch.compile`, a change of `capacity_factor` or `top_k` compiles the router again; a change of which
experts may be chosen does so when the first is closed and when the last is opened, not in between.
"""

from .revival import revive_dead_experts
from .schedules import CapacitySchedule, Curve, ExpertDropout, ExpertWarmup, Schedule
from .utilisation import RouterUtilisation, UtilisationMonitor, UtilisationReport

__all__ = [
    "CapacitySchedule",
    "Curve",
    "ExpertDropout",
    "ExpertWarmup",
    "RouterUtilisation",
    "Schedule",
    "UtilisationMonitor",
    "UtilisationReport",
    "revive_dead_experts",
]
