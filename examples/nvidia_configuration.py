"""Configure the NVIDIA backend: what is here, what each chip can do, sizes, torch's switches, kernels, memory.

Without CUDA the parts that need a device say so in a sentence; everything else is shown on the CPU.
"""

import torch
from torch import nn

import kpt_core
from kpt_backend_nvidia import (
    CHIPS,
    DeviceManager,
    NVIDIABackend,
    NVIDIAConfig,
    NVIDIAMemoryManager,
    OutOfMemoryError,
    advise,
    apply_settings,
    capabilities_of,
    environment,
    pad_model,
    peaks_of,
    tile_efficiency,
    unpad_model,
    wave_efficiency,
)
from kpt_backend_nvidia.chips import compute_capability
from kpt_moe import MoEConfig, MoELayer
from kpt_optimize import gain_of, interleaved_times
from kpt_optimize.cases import case_tables
from kpt_optimize.memory import format_bytes


def show_configuration() -> None:
    """Settings are checked when they are made."""
    backend = NVIDIABackend(NVIDIAConfig(dtype="bfloat16", pad=True, allow_tf32=True))
    print(backend)
    wrong = ({"memory_fracton": 0.8}, {"memory_fraction": 1.5}, {"deterministic": True, "cudnn_benchmark": True})
    for settings in wrong:
        try:
            NVIDIAConfig.from_mapping(settings)
        except kpt_core.KptError as error:
            print(f"  refused: {error}")


def show_machine(manager: DeviceManager) -> None:
    """The software around the device, and the devices."""
    found = environment()
    print(f"torch {found.torch}, CUDA {found.cuda}, driver {found.driver.version}, triton {found.triton}")
    for problem in found.problems:
        print(f"  problem: {problem}")
    for device in manager.devices:
        peaks = device.peaks and f"{device.peaks.bf16_tflops:g} TFLOP/s of bfloat16, {device.peaks.bandwidth:g} GB/s"
        print(
            f"  cuda:{device.index}: {device.name} ({device.chip}), {device.multiprocessors} multiprocessors, {peaks}"
        )
    if not manager.devices:
        print("  no device is seen; each would be listed here with its chip, its memory and its data sheet's peaks")


def show_chips() -> None:
    """What a chip can do is known without one; `requires` of a kernel is compared with it."""
    for chip in CHIPS:
        print(f"  {chip:6} {' '.join(sorted(capabilities_of(compute_capability(chip))))}")
    for product in ("NVIDIA L4", "NVIDIA H200", "NVIDIA B200"):
        peaks = peaks_of(product)
        assert peaks is not None
        least = peaks.bf16_tflops * 1e3 / peaks.bandwidth
        rates = f"{peaks.bf16_tflops:g} TFLOP/s of bfloat16, {peaks.bandwidth:g} GB/s"
        print(f"  {product}: {rates}; below {least:.0f} FLOP a byte it waits for memory")


def show_shapes(device: torch.device) -> None:
    """Sizes that tensor cores like, padding that changes no result, and what it costs or gains here."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(250, 1001), nn.GELU(), nn.Linear(1001, 250)).to(device)
    for advice in advise(model, torch.bfloat16):
        print(f"  {advice}")
    tall, short = (tile_efficiency(40, 1024, (rows, 128)) for rows in (128, 64))
    print(f"  40 rows of an expert fill {tall:.0%} of tiles of 128 rows and {short:.0%} of tiles of 64")
    print(f"  140 tiles keep the 132 multiprocessors of an H200 {wave_efficiency(140, 132):.0%} busy")

    x = torch.randn(512, 250, device=device)
    plain, names = nn.Sequential(*model), list(model.state_dict())
    with torch.no_grad():
        expected = model(x)
        padding = pad_model(model, torch.bfloat16)
        difference = (model(x) - expected).abs().max() / expected.abs().max()
        before, after = interleaved_times([lambda: plain(x), lambda: model(x)], device, 0.4)
    gain, noise = gain_of(before, after)
    assert list(model.state_dict()) == names
    assert model.state_dict()["0.weight"].shape == (1001, 250)
    print(f"  padded: {len(padding.padded)} layers, {padding.extra_bytes:,} bytes more, the same state dict")
    print(f"  largest relative difference {difference:.1e}; {gain:.2f}x as fast here, give or take {noise:.2f}")
    print(f"  {unpad_model(model)} layers unpadded again: measure, and keep what pays")


def show_settings() -> None:
    """Torch's own switches, set for a block and given back."""

    def state() -> str:
        precision, strict = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
        return f"float32 products {precision}, TF32 in cuDNN {torch.backends.cudnn.allow_tf32}, deterministic {strict}"

    print(f"  before: {state()}")
    with apply_settings(NVIDIAConfig(allow_tf32=True, deterministic=True)) as applied:
        print(f"  inside: {state()}")
    print(f"  after:  {state()}")
    print(f"  it had said: {'; '.join(applied.changes)}")


def show_kernels(device: torch.device) -> None:
    """Which kernel serves each op here, why others don't, and on which chips the backend's would be tried."""
    for name, table in sorted(case_tables().items()):
        example = table.arguments(table.cases[0], device=device)
        print(f"  {str(kpt_core.explain(name, **example)).replace(chr(10), chr(10) + '  ')}")
    for kernel in NVIDIABackend().kernels():
        chips = [chip for chip in CHIPS if kernel.requires <= capabilities_of(compute_capability(chip))]
        print(f"  {kernel.op}: needs {', '.join(sorted(kernel.requires))}; tried on {', '.join(chips)}")


def show_memory(device: torch.device) -> None:
    """The manager's margin, an estimate without running, and what a refused allocation says."""
    manager = NVIDIAMemoryManager(device, safety_margin=0.1)
    print(f"  {str(manager.statistics()).replace(chr(10), chr(10) + '  ')}")
    layer = MoELayer(MoEConfig(hidden_size=256, num_experts=16, top_k=4, intermediate_size=512))
    tokens = torch.randn(2048, 256)
    training, inference = (manager.estimate(layer, tokens, training=wanted) for wanted in (True, False))
    peaks = f"{format_bytes(inference.peak)} for inference, {format_bytes(training.peak)} for training"
    parts = f"{format_bytes(training.optimizer_state)} of AdamW, {format_bytes(training.activations)} of activations"
    print(f"  a MoE layer and 2048 tokens will take {peaks}; of that {parts}")
    try:
        manager.allocate(manager.memory().total, torch.uint8)
    except OutOfMemoryError as error:
        print(f"  refused: {str(error).splitlines()[0]}")


def main() -> None:
    """Show all of it."""
    manager = DeviceManager()
    device = manager.roomiest() or torch.device("cpu")
    print("configuration")
    show_configuration()
    print("\nmachine")
    show_machine(manager)
    print("\nchips")
    show_chips()
    print("\nshapes")
    show_shapes(device)
    print("\ntorch's switches")
    show_settings()
    print("\nkernels")
    show_kernels(device)
    print("\nmemory")
    show_memory(device)


if __name__ == "__main__":
    main()
