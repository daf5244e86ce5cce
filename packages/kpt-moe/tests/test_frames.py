import sys

import pytest
import torch

import kpt_core
from kpt_moe import create_moe_layer

OURS = ("/kpt_core/", "/kpt_moe/", "/kpt_backend_cpu/", "<op ")


def test_a_call_takes_a_straight_path_to_the_native_kernels():
    layer, x = create_moe_layer(hidden_size=64, num_experts=8, top_k=2), torch.randn(20, 64)
    frames: list[str] = []

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and any(part in file for part in OURS):
            frames.append(f"{file.rpartition('/')[2]}:{frame.f_code.co_name}")

    with torch.no_grad():
        with kpt_core.record() as log:
            layer(x)
        if any(selection.backend != "cpu" for selection in log):
            pytest.skip("no native library serves")
        layer(x)
        sys.setprofile(note)
        try:
            layer(x)
        finally:
            sys.setprofile(None)
    assert 0 < len(frames) <= 35, frames
