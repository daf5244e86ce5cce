"""What the ops and layers of this package are tried on, for the entry-point group `kpt.cases`."""

from .experts import EXPERTS
from .grouped_mm import GROUPED_MM, GROUPED_MM_WGRAD
from .layers import LAYERS
from .scaled_grouped_mm import SCALED_GROUPED_MM

TABLES = (EXPERTS, GROUPED_MM, GROUPED_MM_WGRAD, SCALED_GROUPED_MM, *LAYERS)
