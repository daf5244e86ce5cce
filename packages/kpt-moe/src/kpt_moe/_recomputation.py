"""Tell whether a forward is a repetition."""

import torch


def in_recomputation() -> bool:
    """Tell whether this forward is one of activation checkpointing, which repeats it inside of backward.

    Such a run is no new decision. In a function that is being compiled it is not known yet: False.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
