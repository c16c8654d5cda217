"""The cost of a CUDA context on a GPU that nobody has measured yet.

It is not documented. Measured by others, as what a first context takes from cuMemGetInfo with drivers of
CUDA 13: 555 MiB on an RTX PRO 6000 Blackwell (188 multiprocessors of 1,536 threads) and 107 MiB on an RTX
4060 Ti (34 of 1,536), github.com/ggml-org/llama.cpp/pull/23604; 300 to 400 MiB on a V100 (80 of 2,048) with
modules of the program, github.com/pytorch/pytorch/issues/20532. These are about 2 KiB for each thread that
the GPU can hold (CUDA C++ Programming Guide, technical specifications per compute capability). The table is
made by that: an assumption that only hardware can settle.

Driver branches before 535 (CUDA 12.2) load all of a program's code with its context, unless asked not to,
and so take more. They are charged the same; what lies above counts once it is measured.
"""

import re
from typing import Final

_THREAD_BYTES: Final = 2 << 10
_STEP: Final = 2 << 20
# Name of the product, by a word of its own -> multiprocessors, and threads that each can hold.
_GPUS: Final = {
    "V100": (80, 2048),
    "T4": (40, 1024),
    "A100": (108, 2048),
    "A30": (56, 2048),
    "A10": (72, 1536),
    "A10G": (80, 1536),
    "A16": (10, 1536),
    "A2": (10, 1536),
    "A40": (84, 1536),
    "L4": (58, 1536),
    "L20": (92, 1536),
    "L40": (142, 1536),
    "L40S": (142, 1536),
    "H100": (114, 2048),  # of the PCIe card, the smallest
    "H20": (78, 2048),
    "H800": (114, 2048),
    "H200": (132, 2048),
    "B200": (148, 2048),
    "B300": (148, 2048),
}


def context_bytes(product: str) -> int:
    """By the name that NVML gives a GPU, such as `NVIDIA A100-SXM4-80GB`; 0: it is not in the table."""
    for word in re.split(r"[\s-]+", product):
        if found := _GPUS.get(word):
            return found[0] * found[1] * _THREAD_BYTES // _STEP * _STEP
    return 0
