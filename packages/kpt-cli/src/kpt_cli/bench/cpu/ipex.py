"""Intel's extension for PyTorch as a peer, where it is installed: beside PyTorch 2.8 alone."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kpt_cli.plugins import installed_version

_DISTRIBUTION = "intel-extension-for-pytorch"


def ipex_absence() -> str:
    """Why it is no peer here; empty if it is one."""
    if installed_version(_DISTRIBUTION) is None:
        return f"{_DISTRIBUTION} is not installed (its last version, 2.8.0, needs PyTorch 2.8)"
    try:
        import intel_extension_for_pytorch  # noqa: F401
    except (ImportError, RuntimeError, OSError, SystemExit) as failure:
        return f"{_DISTRIBUTION} can't be imported: {failure}"
    return ""


def ipex_experts(module: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Gated experts of transformers, served by IPEX's module for MoE models; None where it is absent.

    Args:
        module: its weights are copied: IPEX brings its own into another order, in place, when it is first called.
    """
    if ipex_absence():
        return None
    from intel_extension_for_pytorch.llm.modules import GatedMLPMOE

    served = GatedMLPMOE(module.gate_up_proj.detach().clone(), module.down_proj.detach().clone(), use_prepack=True)

    def run(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        def given(**_: object) -> tuple[Tensor, Tensor]:
            return weights, index

        # It asks for logits, and leaves them to the routing function, which knows the routing already.
        return served(x, False, index.shape[1], x, True, custom_routing_function=given)  # type: ignore[no-any-return]

    return run
