"""The ops of this package, for the entry-point group `kpt.ops`."""

from .experts import experts
from .grouped_mm import grouped_mm, grouped_mm_wgrad
from .scaled_grouped_mm import scaled_grouped_mm

OPS = (experts, grouped_mm, grouped_mm_wgrad, scaled_grouped_mm)
