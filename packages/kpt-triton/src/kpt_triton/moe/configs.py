"""Which tiles are worth measuring for a call; what a configuration does not name is left at its default."""

from typing import Any

from kpt_triton.chips import chip_of

from .activation import GATED
from .experts import is_few, rounds
from .tiles import candidate_tiles


def experts(call: Any) -> list[dict[str, str]]:
    """Return those of each product of `moe.experts`; none where few tokens are computed pair by pair, without tiles."""
    tokens, top_k = call.top_k_index.shape
    products = {"up": "pair" if call.activation in GATED else "crowded", "down": "plain"}
    if rounds(call):
        products = {"up": "pair_codes" if call.activation in GATED else "crowded_codes", "down": "crowded_codes"}
    if call.needs:
        products |= {"slope": "slope", "wgrad": "wgrad"}
    elif is_few(tokens, top_k, call.gate_up_proj.shape[0]):
        return []
    return [config for name, product in products.items() for config in _tiles(call, product, name)]


def grouped_mm(call: Any) -> list[dict[str, str]]:
    """Return those of `moe.grouped_mm`."""
    return _tiles(call, "plain")


def grouped_mm_wgrad(call: Any) -> list[dict[str, str]]:
    """Return those of `moe.grouped_mm_wgrad`."""
    return _tiles(call, "wgrad")


def _tiles(call: Any, product: str, name: str = "tile") -> list[dict[str, str]]:
    return [{name: str(tile)} for tile in candidate_tiles(product, chip_of(call.x.device))]
