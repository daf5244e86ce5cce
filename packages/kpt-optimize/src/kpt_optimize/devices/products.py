"""Published figures of products, by vendor: the one table of them, which backends take their part of.

A product is known here whether or not its vendor's backend is installed, so that `kpt plan` can speak of it. Figures
are of dense products, without structured sparsity; what a chip's code may use is the backend's to know.
"""

from .facts import Peaks

_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, half of its figures with sparsity"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet, half of its figures with sparsity"
_L4 = "NVIDIA L4 Tensor Core GPU data sheet, half of its figures with sparsity"
_B200 = "NVIDIA DGX B200 data sheet, an eighth, half of its figures with sparsity"
_ADA = "NVIDIA Ada GPU Architecture white paper, appendix A"
_RTX = "NVIDIA RTX Blackwell GPU Architecture white paper, appendix A"

#: Vendor, as its backend is called -> product, by the name that the driver gives (JAX for TPUs) -> figures. Of a chip's
#: products the usual one stands first.
PRODUCTS: dict[str, dict[str, Peaks]] = {
    # A part of a GPU (MIG), a laptop's or a regional variant has another name.
    "nvidia": {
        "NVIDIA A100-SXM4-80GB": Peaks("sm80", 80, 312, 2039, _A100),
        "NVIDIA A100-SXM4-40GB": Peaks("sm80", 40, 312, 1555, _A100),
        "NVIDIA A100-PCIE-40GB": Peaks("sm80", 40, 312, 1555, _A100),
        "NVIDIA A100 80GB PCIe": Peaks("sm80", 80, 312, 1935, _A100),
        "NVIDIA A10": Peaks("sm86", 24, 125, 600, "NVIDIA A10 Tensor Core GPU data sheet"),
        "NVIDIA A10G": Peaks("sm86", 24, 70, 600, "NVIDIA A10G data sheet"),
        "NVIDIA L40S": Peaks("sm89", 48, 362, 864, "NVIDIA L40S data sheet", 733),
        "NVIDIA L4": Peaks("sm89", 24, 121, 300, _L4, 242),
        "NVIDIA H100 80GB HBM3": Peaks("sm90", 80, 989, 3350, _H100, 1979),
        "NVIDIA H100 PCIe": Peaks("sm90", 80, 756, 2000, _H100, 1513),
        "NVIDIA H100 NVL": Peaks("sm90", 94, 835, 3900, _H100, 1671),
        "NVIDIA H200": Peaks("sm90", 141, 989, 4800, _H200, 1979),
        "NVIDIA H200 NVL": Peaks("sm90", 141, 835, 4800, _H200, 1671),
        "NVIDIA B200": Peaks("sm100", 180, 2250, 8000, _B200, 4500),
        "NVIDIA GeForce RTX 4090": Peaks("sm89", 24, 165.2, 1008, _ADA, 330.3),
        "NVIDIA GeForce RTX 5090": Peaks("sm120", 32, 209.5, 1792, _RTX, 419),
    },
    "amd": {
        "AMD Instinct MI210": Peaks("gfx90a", 64, 181, 1638.4, "AMD Instinct MI210 data sheet"),
        # A device is one of the two dies.
        "AMD Instinct MI250X": Peaks("gfx90a", 64, 191.5, 1638.4, "AMD Instinct MI250X data sheet, halved"),
        "AMD Instinct MI300X": Peaks("gfx942", 192, 1307.4, 5300, "AMD Instinct MI300X data sheet", 2614.9),
        "AMD Instinct MI325X": Peaks("gfx942", 256, 1307.4, 6000, "AMD Instinct MI325X data sheet", 2614.9),
        "AMD Instinct MI355X": Peaks("gfx950", 288, 2516.6, 8000, "AMD Instinct MI355X data sheet", 5033.2),
        "AMD Radeon RX 7900 XTX": Peaks("gfx1100", 24, 122.8, 960, "AMD Radeon RX 7900 XTX specifications"),
        "AMD Radeon RX 9070 XT": Peaks("gfx1201", 16, 195, 640, "AMD Radeon RX 9070 XT specifications", 389),
    },
    # Products of the matrix units at the highest clock.
    "xpu": {
        # A device is one of the two stacks: 64 Xe cores of 4096 operations a cycle, at 1.6 GHz.
        "Intel(R) Data Center GPU Max 1550": Peaks("pvc", 64, 419, 1638.4, "Intel Data Center GPU Max 1550, halved"),
        # Half of the 233 TOPS of 8-bit integers.
        "Intel(R) Arc(TM) B580 Graphics": Peaks("bmg_g21", 12, 116.5, 456, "Intel Arc B580 specifications"),
        # Half of the 229 TOPS of 8-bit integers.
        "Intel(R) Arc(TM) A750 Graphics": Peaks("acm_g10", 8, 114.5, 512, "Intel Arc A750 specifications"),
    },
    # Memory is that of a device, which is one chip, but on TPU7x one of the chip's two halves.
    "tpu": {
        "TPU v4": Peaks("v4", 32, 275, 1228, "cloud.google.com/tpu/docs/v4"),
        "TPU v5e": Peaks("v5e", 16, 197, 819, "cloud.google.com/tpu/docs/v5e"),
        "TPU v5p": Peaks("v5p", 95, 459, 2765, "cloud.google.com/tpu/docs/v5p"),
        "TPU v6e": Peaks("v6e", 32, 918, 1640, "cloud.google.com/tpu/docs/v6e", 918),
        "TPU7x": Peaks("tpu7x", 96, 1153.5, 3690, "cloud.google.com/tpu/docs/tpu7x, halved", 2307),
    },
}
