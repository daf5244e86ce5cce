"""The devices whose tables are modelled, and what the model has to know of them.

Peaks and memory bandwidths are those of `kpt_backend_nvidia.peaks_of`. Multiprocessors and L2 sizes are from NVIDIA's
architecture white papers (A100, GA102, Ada, H100, RTX Blackwell) and, for B200, as the driver reports them; operations
in a cycle follow from the matrix units that the white papers describe (GeForce cards and the A10G have half of the
chip's rate with float32 sums).

Bandwidth and latency of the L2 cache are in no data sheet. They are ESTIMATES, near published micro-benchmarks of A100,
H100 PCIe, RTX 4090 and B200; `VARIED` says how far they may be off.
"""

from dataclasses import dataclass, replace

from kpt_backend_nvidia import peaks_of
from kpt_triton.moe.roofline import Processor

_MIB = 2**20
#: How far the L2 cache's bandwidth and the latencies may be off: a choice must hold in each corner. The middle is the
#: estimate itself.
VARIED = ((0.7, 0.7), (0.7, 1.4), (1.0, 1.0), (1.4, 0.7), (1.4, 1.4))


@dataclass(frozen=True, slots=True)
class _Figures:
    """See `Processor`; `l2_per_cycle` is in bytes for each multiprocessor, and estimated like the latencies (ns)."""

    chip: str
    multiprocessors: int
    flop_per_cycle: int
    l2_mib: float
    l2_per_cycle: float
    latencies: tuple[float, float]


_AMPERE, _ADA, _HOPPER, _BLACKWELL = (150, 400), (120, 350), (150, 480), (160, 550)

_FIGURES = {
    **dict.fromkeys(
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        _Figures("sm80", 108, 2048, 40, 32, _AMPERE),
    ),
    "NVIDIA A10": _Figures("sm86", 72, 1024, 6, 16, _AMPERE),
    "NVIDIA A10G": _Figures("sm86", 80, 512, 6, 16, _AMPERE),
    "NVIDIA L4": _Figures("sm89", 58, 1024, 48, 16, _ADA),
    "NVIDIA L40S": _Figures("sm89", 142, 1024, 96, 16, _ADA),
    "NVIDIA GeForce RTX 4090": _Figures("sm89", 128, 512, 72, 16, _ADA),
    "NVIDIA H100 80GB HBM3": _Figures("sm90", 132, 4096, 50, 32, _HOPPER),
    "NVIDIA H100 PCIe": _Figures("sm90", 114, 4096, 50, 32, _HOPPER),
    "NVIDIA H100 NVL": _Figures("sm90", 132, 4096, 50, 32, _HOPPER),
    "NVIDIA H200": _Figures("sm90", 132, 4096, 50, 32, _HOPPER),
    "NVIDIA H200 NVL": _Figures("sm90", 132, 4096, 50, 32, _HOPPER),
    "NVIDIA B200": _Figures("sm100", 148, 8192, 126, 48, _BLACKWELL),
    "NVIDIA GeForce RTX 5090": _Figures("sm120", 170, 512, 96, 16, _ADA),
}

#: The names, as the driver gives them.
DEVICES = tuple(_FIGURES)


def processor(device: str) -> Processor:
    """A device for the model, by its name."""
    figures, peaks = _FIGURES[device], peaks_of(device)
    assert peaks is not None, device
    peak = peaks.bf16_tflops * 1e12
    at_once, behind = figures.latencies
    return Processor(
        chip=figures.chip,
        multiprocessors=figures.multiprocessors,
        flop_per_cycle=figures.flop_per_cycle,
        peak=peak,
        bandwidth=peaks.bandwidth * 1e9,
        l2_bytes=figures.l2_mib * _MIB,
        l2_bandwidth=figures.l2_per_cycle * peak / figures.flop_per_cycle,
        l2_latency=at_once * 1e-9,
        memory_latency=behind * 1e-9,
    )


def variants(device: str) -> list[Processor]:
    """A device with every estimate as it is, too low and too high."""
    known = processor(device)
    return [
        replace(
            known,
            l2_bandwidth=known.l2_bandwidth * bandwidth,
            l2_latency=known.l2_latency * latency,
            memory_latency=known.memory_latency * latency,
        )
        for bandwidth, latency in VARIED
    ]
