"""What a rank's process runs: not in conftest.py, of which a test session has several by one name."""

import os
import pickle
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def run_rank(function: Callable[..., Any], rank: int, ranks: int, store: str, seconds: float, arguments: Any, end: Any):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds)
        )
        result = function(rank, *arguments)
        dist.destroy_process_group()
        end.send_bytes(pickle.dumps((True, result)))
    except BaseException:
        end.send_bytes(pickle.dumps((False, traceback.format_exc())))
    end.close()
