"""Bytes."""

import pytest
import torch
from torch import nn

from kpt_optimize.memory import format_bytes, segment_bytes, storage_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * MIB // 2, "1.50 MiB"), (5 * 2**30, "5.00 GiB")],
)
def test_bytes_are_written_in_the_largest_unit(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (0, 0),
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 1, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
    ],
)
def test_segments_are_the_allocator_s(nbytes, segment):
    assert segment_bytes(nbytes) == segment


def test_storages_count_once_and_whole():
    large = torch.empty(100)
    assert storage_bytes([large[3:5], large[50:], torch.empty(7)]) == 400 + 28


def test_sparse_gradients_count_with_their_indices():
    embedding = nn.Embedding(1000, 8, sparse=True)
    embedding(torch.tensor([3, 5])).sum().backward()
    assert storage_bytes([embedding.weight.grad]) == 2 * 8 * 4 + 2 * 8
