"""NVIDIA's cuda.h of three CUDA versions, and every entry point that each declares.

The headers are read as the compiler reads them: with `__CUDA_API_VERSION_INTERNAL` they declare every ABI of
every function under the name that the driver exports it by, those of the per-thread default stream included.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clib import toolchain
from clib.wheels import BuildError, unpacked

PACKAGES: Final = {
    "11.8": "nvidia-cuda-runtime-cu11",
    "12": "nvidia-cuda-runtime-cu12",
    "13": "nvidia-cuda-runtime",
}
"""Label of a header version -> the package that has it."""
_PLATFORM: Final = "manylinux2014_x86_64"
_NAME: Final = re.compile(r"(?P<base>cu\w+?)(?:_v(?P<abi>\d+))?(?P<stream>_ptsz|_ptds)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPoint:
    """One symbol of libcuda.so.1."""

    symbol: str
    """As exported: `cuMemcpyHtoD_v2_ptds`."""
    base: str
    """As the resolver is asked for it: `cuMemcpyHtoD`."""
    abi: int
    """The number in `_v2`; 1 without one."""
    stream: str
    """`_ptsz` or `_ptds` where NULL means the thread's own default stream; otherwise empty."""
    version: int
    """The CUDA version from which `cuGetProcAddress` answers this ABI, as 1000 x major + 10 x minor."""
    parameters: tuple[str, ...]
    """The parameters as declared, with their names: `CUdeviceptr *dptr`. Empty for none."""


def include(label: str) -> Path:
    """The folder with cuda.h, cudaTypedefs.h and their companions, fetched once. Raises BuildError."""
    root = unpacked(PACKAGES[label], _PLATFORM, lambda name: "/include/cuda" in name and name.count("/") == 3)
    (folder,) = {path.parent for path in root.rglob("cuda.h")}
    return folder


@functools.cache
def entry_points(label: str) -> tuple[EntryPoint, ...]:
    """Every symbol that cuda.h of `label` declares, in its order. Raises BuildError."""
    folder = include(label)
    declared = _declarations(folder)
    versions = _versions((folder / "cudaTypedefs.h").read_text())
    order: dict[tuple[str, str], list[str]] = {}
    for symbol in sorted(declared, key=lambda name: _parts(name)[1]):
        base, _, stream = _parts(symbol)
        order.setdefault((base, stream), []).append(symbol)
    found: dict[str, int] = {}
    for key, symbols in order.items():
        # The n-th ABI of a name is the n-th version in the table of types.
        if len(versions.get(key, ())) != len(symbols):
            raise BuildError(f"cudaTypedefs.h of {label} has {versions.get(key)} for {', '.join(symbols)}")
        found.update(zip(symbols, versions[key], strict=True))
    return tuple(
        EntryPoint(
            symbol=symbol,
            base=_parts(symbol)[0],
            abi=_parts(symbol)[1],
            stream=_parts(symbol)[2],
            version=found[symbol],
            parameters=parameters,
        )
        for symbol, parameters in declared.items()
    )


def _declarations(folder: Path) -> dict[str, tuple[str, ...]]:
    defined = "-D__CUDA_API_VERSION_INTERNAL"
    text = toolchain.compile_c(["-E", "-P", defined, f"-I{folder}", "-x", "c", "cuda.h"], folder)
    found = re.findall(r"\bCUresult (cu[A-Z]\w+) ?\(([^;{]*?)\) ?;", re.sub(r"\s+", " ", text))
    return {
        symbol: () if parameters.strip() == "void" else tuple(part.strip() for part in parameters.split(","))
        for symbol, parameters in found
    }


def _versions(typedefs: str) -> dict[tuple[str, str], list[int]]:
    text = re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/|//[^\n]*", "", typedefs, flags=re.DOTALL))
    found: dict[tuple[str, str], set[int]] = {}
    # Some headers give a type without a version and name the version in a macro alone.
    for base, version, stream in re.findall(r"\bPFN_(cu\w+?)_v(\d{4,})(_ptsz|_ptds)?\b", text):
        found.setdefault((base, stream), set()).add(int(version))
    return {key: sorted(numbers) for key, numbers in found.items()}


def _parts(symbol: str) -> tuple[str, int, str]:
    match = _NAME.fullmatch(symbol)
    if match is None:
        raise BuildError(f"{symbol} is no name of an entry point")
    return match["base"], int(match["abi"] or 1), match["stream"] or ""
