"""What the ops and layers of this package are tried on, for the entry-point group `kpt.cases`."""

from .experts import EXPERTS
from .grouped_mm import GROUPED_MM, GROUPED_MM_WGRAD
from .layers import LAYERS
from .scaled_grouped_mm import SCALED_GROUPED_MM
from .top_k_gating import TOP_K_GATING

TABLES = (EXPERTS, GROUPED_MM, GROUPED_MM_WGRAD, SCALED_GROUPED_MM, TOP_K_GATING, *LAYERS)
