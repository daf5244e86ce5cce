"""Experts over the course of training: their capacity, which of them may be chosen, and what becomes of idle ones.

Everything here changes routers between steps, never within one: call `step()` once after each step of the optimizer.
On a model under `torch.compile`, a change of `capacity_factor` compiles the router again; a change of which experts may
be chosen does so when the first is closed and when the last is opened, not in between.
"""

from .schedules import CapacitySchedule, ExpertDropout, ExpertWarmup, Schedule
from .utilisation import UtilisationMonitor, revive_dead_experts

__all__ = ["CapacitySchedule", "ExpertDropout", "ExpertWarmup", "Schedule", "UtilisationMonitor", "revive_dead_experts"]
