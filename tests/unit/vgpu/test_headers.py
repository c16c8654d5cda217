"""The headers that the enforcement library is generated from: fetched by hash, read in full."""

import re
from pathlib import Path

import pytest

from clib import headers, wheels
from clib.wheels import BuildError


@pytest.mark.timeout(600)  # the first run on a machine fetches compiler and headers
@pytest.mark.parametrize(("label", "least"), [("11.8", 508), ("12", 616), ("13", 685)])
def test_every_declared_symbol_is_read(label: str, least: int) -> None:
    points = headers.entry_points(label)
    symbols = {point.symbol for point in points}
    assert len(symbols) == len(points) >= least
    text = (headers.include(label) / "cuda.h").read_text()
    # Each name in a declaration or a macro that maps one ABI to another is accounted for.
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for name in re.findall(r"CUresult\s+CUDAAPI\s+(cu[A-Z]\w+)\s*\(", text):
        assert name in symbols, name
    for name in re.findall(r"#define\s+cu\w+\s+(cu[A-Z]\w+)[ \t]*$", text, flags=re.MULTILINE):
        # A wrapper in the header itself, not a symbol.
        assert name in symbols or re.search(rf"static inline CUresult {name}\(", text), name


def test_abis_of_one_name_are_told_apart() -> None:
    points = {point.symbol: point for point in headers.entry_points("13")}
    old, new = points["cuMemAlloc"], points["cuMemAlloc_v2"]
    assert (old.base, old.abi, old.version) == ("cuMemAlloc", 1, 2000)
    assert (new.base, new.abi, new.version) == ("cuMemAlloc", 2, 3020)
    assert new.parameters == ("CUdeviceptr *dptr", "size_t bytesize")
    assert points["cuMemAllocAsync_ptsz"].stream == "_ptsz"
    assert points["cuGetProcAddress_v2"].version == 12000
    assert points["cuCtxSynchronize"].parameters == ()


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "wheels.lock"
    lock.write_text(f"nvidia-cuda-runtime-cu11==11.8.89 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setattr(wheels, "LOCK", lock)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(BuildError, match="cannot fetch nvidia-cuda-runtime-cu11"):
        wheels.unpacked("nvidia-cuda-runtime-cu11", "manylinux2014_x86_64", lambda _: True)
    assert list((tmp_path / "gpu-node-agent" / "clib").glob("nvidia*")) == []
