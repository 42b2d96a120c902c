"""The table of cards. Dense peaks with fp32 sums, in 10¹² FLOP/s; each row says where it was read.

A driver knows better than a table how many multiprocessors, how much cache and memory a card has: where there is
a card, `ridgeline.hardware.present` replaces those figures by the driver's. Shared memory sizes are those of the
compute capability in NVIDIA's tuning guides and in the architecture traits of NVIDIA/cccl.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.errors import UnsupportedError, nearest
from ridgeline.hardware.spec import DeviceSpec

_GPU_SPECS = "winston-zhang-orz/gpu-specs specs.md"
_A100_PAPER = "NVIDIA A100 architecture whitepaper, comparison table"
_ADA_PAPER = "NVIDIA Ada architecture whitepaper 2.1, appendix A"
_RTX_BLACKWELL_PAPER = "NVIDIA RTX Blackwell architecture whitepaper 1.1, appendix A"
_PRO_PAPER = "NVIDIA RTX PRO Blackwell whitepaper table 4, quoted in NeMo Automodel PR 3598; hmc-tech.com"
_HOPPER = "NVIDIA H100 dense table at glennklockwood.com; hpctech.co.jp H100 page; karpathy/llm.c llmc/mfu.h"
_B200_SHEET = "NVIDIA Blackwell datasheet, HGX B200 (rates halved from sparse; it prints 7.7 TB/s)"

_A100 = DeviceSpec(
    key="a100",
    name="NVIDIA A100 SXM 80 GB",
    driver_names=("a100-sxm4-80gb", "a100-sxm-80gb"),
    capability=(8, 0),
    sm_count=108,
    tflops={"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312},
    gb_per_s=2039,
    memory_gib=80,
    l2_mib=40,
    shared_kib=(164, 163),
    power_w=400,
    source=f"{_A100_PAPER}; {_GPU_SPECS}",
)
_PRO_6000 = DeviceSpec(
    key="rtx-pro-6000",
    name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    driver_names=("rtx pro 6000 blackwell workstation edition",),
    capability=(12, 0),
    sm_count=188,
    tflops={"fp32": 126, "tf32": 251.9, "fp16": 503.8, "bf16": 503.8, "fp8": 1007.6, "fp4": 2015},
    gb_per_s=1792,
    memory_gib=96,
    l2_mib=128,
    shared_kib=(100, 99),
    power_w=600,
    source=f"{_PRO_PAPER}; chipsandcheese.com GB202",
)
_H100 = DeviceSpec(
    key="h100",
    name="NVIDIA H100 SXM5",
    driver_names=("h100 80gb hbm3", "h100 sxm5 80gb"),
    capability=(9, 0),
    sm_count=132,
    tflops={"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9},
    gb_per_s=3350,
    memory_gib=80,
    l2_mib=50,
    shared_kib=(228, 227),
    power_w=700,
    source=_HOPPER,
)

_CARDS = (
    DeviceSpec(
        key="t4",
        name="NVIDIA T4",
        driver_names=("tesla t4", "t4"),
        capability=(7, 5),
        sm_count=40,
        tflops={"fp32": 8.1, "fp16": 65},
        gb_per_s=320,
        memory_gib=16,
        l2_mib=4,
        shared_kib=(64, 64),
        power_w=70,
        source="sysrqmts.com T4 page",
    ),
    DeviceSpec(
        key="v100",
        name="NVIDIA V100 SXM2",
        driver_names=("tesla v100-sxm2-16gb", "tesla v100-sxm2-32gb"),
        capability=(7, 0),
        sm_count=80,
        tflops={"fp32": 15.7, "fp16": 125},
        gb_per_s=900,
        memory_gib=16,
        l2_mib=6,
        shared_kib=(96, 96),
        power_w=300,
        source=f"{_A100_PAPER}; {_GPU_SPECS}",
    ),
    _A100,
    replace(
        _A100,
        key="a100-40gb",
        name="NVIDIA A100 SXM 40 GB",
        driver_names=("a100-sxm4-40gb", "a100-sxm-40gb"),
        gb_per_s=1555,
        memory_gib=40,
    ),
    replace(
        _A100,
        key="a100-pcie",
        name="NVIDIA A100 PCIe 80 GB",
        driver_names=("a100 80gb pcie",),
        gb_per_s=1935,
        power_w=None,
    ),
    DeviceSpec(
        key="a10",
        name="NVIDIA A10",
        driver_names=("a10",),
        capability=(8, 6),
        sm_count=72,
        tflops={"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125},
        gb_per_s=600,
        memory_gib=24,
        l2_mib=6,  # 512 KiB for each of the twelve 32-bit controllers of its 384-bit bus
        shared_kib=(100, 99),
        power_w=None,
        source=f"{_GPU_SPECS}; NVIDIA GA102 whitepaper for the cache",
    ),
    DeviceSpec(
        key="rtx-3090",
        name="NVIDIA GeForce RTX 3090",
        driver_names=("geforce rtx 3090",),
        capability=(8, 6),
        sm_count=82,
        tflops={"fp32": 35.6, "tf32": 35.6, "fp16": 71, "bf16": 71},
        tflops_fp16_sum={"fp16": 142},
        gb_per_s=936,
        memory_gib=24,
        l2_mib=6,
        shared_kib=(100, 99),
        power_w=None,
        source="karpathy/nanochat common.py; NVIDIA GA102 whitepaper (6144 KB of L2)",
    ),
    DeviceSpec(
        key="l4",
        name="NVIDIA L4",
        driver_names=("l4",),
        capability=(8, 9),
        sm_count=58,
        tflops={"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "fp8": 242},
        gb_per_s=300,
        memory_gib=24,
        l2_mib=48,
        shared_kib=(100, 99),
        power_w=72,
        source=f"{_GPU_SPECS}; fpsbench.com L4 page for the cache; 7424 cores / 128 multiprocessors",
    ),
    DeviceSpec(
        key="l40s",
        name="NVIDIA L40S",
        driver_names=("l40s",),
        capability=(8, 9),
        sm_count=142,
        tflops={"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362, "fp8": 733},
        gb_per_s=864,
        memory_gib=48,
        l2_mib=None,
        shared_kib=(100, 99),
        power_w=350,
        source=f"NVIDIA L40S datasheet; {_GPU_SPECS}",
    ),
    DeviceSpec(
        key="rtx-4090",
        name="NVIDIA GeForce RTX 4090",
        driver_names=("geforce rtx 4090",),
        capability=(8, 9),
        sm_count=128,
        tflops={"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3},
        tflops_fp16_sum={"fp16": 330.3, "fp8": 660.6},
        gb_per_s=1008,
        memory_gib=24,
        l2_mib=72,
        shared_kib=(100, 99),
        power_w=450,
        source=f"{_ADA_PAPER}; karpathy/llm.c llmc/mfu.h",
    ),
    DeviceSpec(
        key="rtx-5090",
        name="NVIDIA GeForce RTX 5090",
        driver_names=("geforce rtx 5090",),
        capability=(12, 0),
        sm_count=170,
        tflops={"fp32": 104.8, "fp16": 209.5, "bf16": 209.5, "fp8": 419, "fp4": 1676},
        tflops_fp16_sum={"fp16": 419, "fp8": 838},
        gb_per_s=1792,
        memory_gib=32,
        l2_mib=96,
        shared_kib=(100, 99),
        power_w=575,
        source=f"{_RTX_BLACKWELL_PAPER}; karpathy/nanochat issue 60",
    ),
    _PRO_6000,
    replace(
        _PRO_6000,
        key="rtx-pro-6000-max-q",
        name="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        driver_names=("rtx pro 6000 blackwell max-q workstation edition",),
        tflops={"fp16": 438.9, "bf16": 438.9},
        power_w=300,
        source=_PRO_PAPER,
    ),
    DeviceSpec(
        key="h100-pcie",
        name="NVIDIA H100 PCIe",
        driver_names=("h100 pcie",),
        capability=(9, 0),
        sm_count=114,
        tflops={"fp32": 51.2, "tf32": 378, "fp16": 756, "bf16": 756, "fp8": 1513},
        gb_per_s=2000,
        memory_gib=80,
        l2_mib=50,
        shared_kib=(228, 227),
        power_w=350,
        source=_HOPPER,
    ),
    _H100,
    replace(
        _H100,
        key="h200",
        name="NVIDIA H200 SXM",
        driver_names=("h200",),
        gb_per_s=4800,
        memory_gib=139.8,
        l2_mib=60,
        power_w=700,
        source=f"{_HOPPER}; memory, cache and power as driver 580 gives them for one",
    ),
    DeviceSpec(
        key="b200",
        name="NVIDIA B200 SXM",
        driver_names=("b200",),
        capability=(10, 0),
        sm_count=148,
        tflops={"fp32": 75, "tf32": 1100, "fp16": 2250, "bf16": 2250, "fp8": 4500, "fp4": 9000},
        gb_per_s=8000,
        memory_gib=180,
        l2_mib=126,
        shared_kib=(228, 227),
        power_w=1000,
        source=f"{_B200_SHEET}; chipsandcheese.com B200; karpathy/nanochat common.py for 8 TB/s",
    ),
    DeviceSpec(
        key="mi300x",
        name="AMD Instinct MI300X",
        driver_names=("amd instinct mi300x",),
        capability=None,
        sm_count=304,
        tflops={"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9},
        gb_per_s=5300,
        memory_gib=192,
        l2_mib=32,  # 4 MiB on each of eight dies, under a last-level cache of 256 MiB
        shared_kib=(64, 64),
        power_w=750,
        source="PyTorch torch/_inductor device_info.py; AMD ROCm documentation; servethehome.com",
    ),
)

CARDS: dict[str, DeviceSpec] = {card.key: card for card in _CARDS}


def card(key: str) -> DeviceSpec:
    """The card called `key` in the table; case, hyphens and spaces do not matter.

    Raises:
        UnsupportedError: there is no such card.
    """
    found = {_plain(name): spec for name, spec in CARDS.items()}.get(_plain(key))
    if found is None:
        raise UnsupportedError(nearest(key, CARDS, "card"))
    return found


def _plain(key: str) -> str:
    return key.lower().replace("-", "").replace(" ", "").replace("_", "")


def by_driver_name(name: str) -> DeviceSpec | None:
    """The card that a driver calls `name`, or None. Laptop, D and NVL variants are other cards, so names are exact."""
    wanted = name.lower().removeprefix("nvidia ").strip()
    return next((spec for spec in _CARDS if wanted in spec.driver_names), None)
