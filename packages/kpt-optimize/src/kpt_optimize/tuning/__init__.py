"""Choice by measurement: tables of what is fastest on a device, and what measures it."""

from kpt_core.errors import TuningWarning

from .files import TuningEntry
from .tables import device_name

__all__ = ["TuningEntry", "TuningWarning", "device_name"]
