"""The ops of this package, for the entry-point group `kpt.ops`."""

from .experts import experts
from .grouped_mm import grouped_mm, grouped_mm_wgrad
from .scaled_grouped_mm import scaled_grouped_mm
from .top_k_gating import top_k_gating

OPS = (experts, grouped_mm, grouped_mm_wgrad, scaled_grouped_mm, top_k_gating)
