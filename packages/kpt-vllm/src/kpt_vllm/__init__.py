"""KPT's kernels for the experts of models that vLLM serves: installed beside vLLM, it is found and used.

vLLM calls `register` in each of its processes, by the entry point `vllm.general_plugins`. Nothing of vLLM, torch or KPT
is imported before that.
"""

import os

__version__ = "0.1.0"

#: "0" leaves all experts to vLLM.
KPT_VLLM = "KPT_VLLM"


def register() -> None:
    """Put KPT's experts in the place of vLLM's for layers whose weights are no quantised numbers.

    Where this version of vLLM has no such place, vLLM's own experts run, with one warning.

    Raises:
        InputError: the variable `KPT_VLLM` is neither 0 nor 1.
    """
    asked = os.environ.get(KPT_VLLM, "").strip().lower()
    if asked in ("0", "false"):
        return
    from kpt_core import InputError, PluginWarning
    from kpt_core.errors import describe_error, warn_caller

    if asked not in ("", "1", "true"):
        raise InputError(f"{KPT_VLLM}={asked!r}: expected 0, which leaves experts to vLLM, or 1")
    try:
        from . import experts  # noqa: F401  its class registers itself
    except (ImportError, AttributeError) as error:  # a module, or the hook in one, is gone
        warn_caller(
            f"vLLM runs experts itself, not KPT: kpt-vllm does not fit this vLLM ({describe_error(error)}); install "
            f"vLLM 0.32, or set {KPT_VLLM}=0 to be told no more",
            PluginWarning,
        )
