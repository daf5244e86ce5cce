"""Memory of a whole process while it loads or converts a checkpoint of some 60 MB, beside what it had before."""

import gc
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from checkpoint_files import quantized
from processes import run
from transformers_models import model

#: About 60 million numbers in linear layers each; a scale of an expert is some bytes among 512 KiB and more.
SIZES = {
    "mixtral": {"hidden_size": 512, "intermediate_size": 2048, "num_local_experts": 9},
    "llama": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4},
}
#: To measure: pages of files count as they do for the system's own limits.
MEASURE = """
    import gc, sys, warnings
    from pathlib import Path

    def memory(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

    def peak_of(work):
        gc.collect()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
        except OSError:
            pass  # the peak of the imports is above that by little
        before = memory("VmRSS:")
        kept = work()
        return memory("VmHWM:") - before, kept
"""
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no system that tells a peak")


@pytest.fixture(scope="module", params=SIZES)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folders(kind, tmp_path_factory):
    """The plain checkpoint, in one file, and a small one for what a process needs once."""
    place = tmp_path_factory.mktemp(kind)
    for name, sizes in (("plain", SIZES[kind]), ("tiny", {})):
        model(kind, **sizes).bfloat16().save_pretrained(place / name)
        quantized(place / f"{name}-fp8", place / name, "ct-channel")
    gc.collect()
    return place


def test_loading_takes_little_more_than_the_model(folders):
    script = """
    import torch
    from kpt_fp8.transformers import load

    def loaded(folder):
        model = load(folder)
        for each in model.parameters():  # weights that are mapped from a file come into memory
            getattr(each, "codes", each).view(torch.uint8).flatten().amax()
        return model

    loaded(sys.argv[2])
    peak, model = peak_of(lambda: loaded(sys.argv[1]))
    print(peak, sum(each.nbytes for each in model.parameters()))
    """
    peak, size = map(int, run(MEASURE + script, folders / "plain-fp8", folders / "tiny-fp8"))
    assert size > 55e6
    assert peak < 1.15 * size


@pytest.mark.parametrize("source", ["plain", "plain-fp8"])
def test_converting_takes_a_file_and_a_matrix(source, kind, folders, tmp_path):
    script = """
    from kpt_fp8.checkpoints import convert_checkpoint

    def convert(source, target):
        return convert_checkpoint(source, target, to="compressed-tensors", max_shard_bytes=8 << 20)

    source, tiny, target = map(Path, sys.argv[1:])
    convert(tiny, target / "tiny")
    peak, report = peak_of(lambda: convert(source, target / "out"))
    print(peak, report.bytes)
    """
    tiny = folders / source.replace("plain", "tiny")
    # What is freed goes back to the system at once, so that the peak is what was held.
    peak, size = map(int, run(MEASURE + script, folders / source, tiny, tmp_path, MALLOC_MMAP_THRESHOLD_="65536"))
    assert size > 55e6
    matrix = SIZES[kind]["hidden_size"] * SIZES[kind]["intermediate_size"] * (2 if source == "plain" else 1)
    assert peak < (8 << 20) + 3 * matrix + (6 << 20)
