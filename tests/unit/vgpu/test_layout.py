"""The limit file and the usage region: what is written is read, and garbage is never believed."""

import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.vgpu import layout
from agent.vgpu.isolation_errors import BadLayout
from agent.vgpu.layout import DeviceLimits, wake

GPU = "GPU-11111111-2222-3333-4444-555555555555"
OTHER = "GPU-99999999-2222-3333-4444-555555555555"
GIB = 1 << 30


def test_limits_come_back_as_they_were_written() -> None:
    limits = [
        DeviceLimits(GPU, 10 * GIB, 30, strict=True),
        DeviceLimits(OTHER, GIB, unseen_bytes=5, driver=True),
    ]
    content = layout.limit_file("name", limits)
    assert len(content) == layout.LIMITS_BYTES
    assert layout.read_limits(content) == limits


def test_a_change_is_one_write_of_the_copy_that_is_not_in_force(tmp_path: Path) -> None:
    file = tmp_path / "limits"
    file.write_bytes(layout.limit_file("name", [DeviceLimits(GPU, GIB)]))
    descriptor = os.open(file, os.O_RDWR)
    try:
        for size in (2 * GIB, 3 * GIB, GIB):
            before = file.read_bytes()
            layout.write_limits(descriptor, 0, DeviceLimits(GPU, size))
            after = file.read_bytes()
            changed = [at for at in range(len(after)) if after[at] != before[at]]
            place = (changed[0] - layout.RECORDS_AT) // layout.COPY_BYTES
            start = layout.RECORDS_AT + place * layout.COPY_BYTES
            assert start <= changed[0] <= changed[-1] < start + layout.COPY_BYTES
            assert layout.read_limits(after) == [DeviceLimits(GPU, size)]
            # Torn anywhere, the limits of before are in force, or already those of now.
            for cut in range(0, layout.COPY_BYTES, 7):
                torn = after[: start + cut] + before[start + cut :]
                assert layout.read_limits(torn)[0] in (layout.read_limits(before)[0], DeviceLimits(GPU, size))
    finally:
        os.close(descriptor)


@given(st.integers(0, layout.RECORDS_AT + 2 * layout.COPY_BYTES - 1), st.integers(1, 255))
def test_no_changed_byte_is_taken_for_other_limits(at: int, change: int) -> None:
    limits = [DeviceLimits(GPU, 10 * GIB, 30)]
    content = bytearray(layout.limit_file("name", limits))
    content[at] ^= change
    try:
        found = layout.read_limits(bytes(content))
    except BadLayout:
        return
    assert found == limits


@given(st.binary(max_size=layout.LIMITS_BYTES))
def test_garbage_is_no_limit_file(content: bytes) -> None:
    with pytest.raises(BadLayout):
        layout.read_limits(content)


@given(st.binary(max_size=300))
def test_garbage_in_a_usage_region_is_a_hint_at_most(head: bytes) -> None:
    content = head + bytes(layout.usage_head_bytes(2) - len(head))
    with pytest.raises(BadLayout):
        layout.read_usage(content)
    with pytest.raises(BadLayout):
        layout.read_usage(head)


def test_a_new_usage_region_counts_nothing() -> None:
    head = layout.usage_head(2)
    content = head + bytes(layout.usage_head_bytes(2) - len(head))
    assert layout.read_usage(content) == [layout.CountedUsage(0, 0, 0, 0)] * 2


def test_a_name_of_any_length_fits(tmp_path: Path) -> None:
    content = layout.limit_file("n" * 200, [DeviceLimits(GPU, GIB)])
    header = content[: layout.HEADER.size]
    assert zlib.crc32(header) == int.from_bytes(content[layout.HEADER.size : layout.RECORDS_AT], "little")
    assert layout.read_limits(content) == [DeviceLimits(GPU, GIB)]


def test_a_gpu_without_a_uuid_is_refused() -> None:
    with pytest.raises(BadLayout, match="no UUID"):
        layout.limit_file("name", [DeviceLimits("GPU-0", GIB)])


def test_a_wake_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "limits"
    file.write_bytes(layout.limit_file("name", [DeviceLimits(GPU, GIB)]))
    descriptor = os.open(file, os.O_RDONLY)
    try:
        assert wake(descriptor, layout.CHANGES_AT, layout.LIMITS_BYTES) == 0  # not mapped for writing
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("forged", [b"\x1b[31mcu", b"cu Mem", b"cu" + b"a" * 62, b"\xff" * 64, b"malloc"])
def test_a_name_in_the_usage_region_that_no_entry_point_has_is_none(forged: bytes) -> None:
    content = bytearray(layout.usage_head(1))
    layout.NEWER.pack_into(content, layout.NEWER_AT, 1, forged)
    (usage,) = layout.read_usage(bytes(content))
    assert (usage.newer, usage.newer_name) == (1, "")
