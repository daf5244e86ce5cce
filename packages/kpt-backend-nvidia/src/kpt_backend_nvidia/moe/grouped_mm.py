"""`moe.grouped_mm` and `moe.grouped_mm_wgrad` in Triton."""

from torch import Tensor

from kpt_core import tuned_config
from kpt_triton.moe import grouped_mm as product
from kpt_triton.moe import grouped_mm_wgrad as wgrad
from kpt_triton.moe.tiles import candidate_tiles, chip_of

_PRODUCT = "kpt_backend_nvidia.moe.grouped_mm:grouped_mm"
_WGRAD = "kpt_backend_nvidia.moe.grouped_mm:grouped_mm_wgrad"


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """`kpt_triton.moe.grouped_mm.grouped_mm`, with the tile that was measured for the device, if any."""
    found = tuned_config("moe.grouped_mm", _PRODUCT, x, weight, offsets)
    return product.grouped_mm(x, weight, offsets, tile="" if found is None else found["tile"])


def configs(x: Tensor, weight: Tensor, offsets: Tensor) -> list[dict[str, str]]:
    """The tiles that are worth measuring."""
    return [{"tile": str(tile)} for tile in candidate_tiles("plain", chip_of(x.device))]


def grouped_mm_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """`kpt_triton.moe.grouped_mm_wgrad.grouped_mm_wgrad`, likewise."""
    found = tuned_config("moe.grouped_mm_wgrad", _WGRAD, x, grad, offsets)
    return wgrad.grouped_mm_wgrad(x, grad, offsets, tile="" if found is None else found["tile"])


def configs_of_wgrad(x: Tensor, grad: Tensor, offsets: Tensor) -> list[dict[str, str]]:
    """The tiles that are worth measuring."""
    return [{"tile": str(tile)} for tile in candidate_tiles("wgrad", chip_of(x.device))]
