"""Device IDs: what is written is read back, everything else is refused with a reason."""

import uuid
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.model.modes import INSTANCE, LONGEST, REPLICA, UNITS, WHOLE, BadDeviceId, DeviceId, parse
from agent.model.pod import MPS, VGPU

GPU = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"

gpus = st.uuids().map(lambda value: f"GPU-{value}")
numbers = st.integers(0, 99_999)
ids = st.one_of(
    st.builds(DeviceId, gpus, st.just(WHOLE)),
    st.builds(DeviceId, st.uuids().map(lambda value: f"MIG-{value}"), st.just(INSTANCE)),
    st.builds(DeviceId, gpus, st.sampled_from([unit for unit in UNITS.values() if unit.mark]), numbers),
)


@given(ids)
def test_what_is_written_is_read_back(one: DeviceId) -> None:
    text = str(one)
    assert parse(text) == one
    assert len(text) <= LONGEST
    assert text.partition("::")[0] == one.gpu  # how exporters find the GPU


@given(ids, ids)
def test_two_ids_never_read_alike(one: DeviceId, other: DeviceId) -> None:
    assert (str(one) == str(other)) == (one == other)


@given(st.text(max_size=80))
@example(f"{GPU}::")
@example(f"{GPU}::c")
@example(f"{GPU}::c\u0663")  # a digit, but not one of ours
def test_any_text_is_an_id_that_writes_itself_or_is_refused(text: str) -> None:
    with suppress(BadDeviceId):
        assert str(parse(text)) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GPU, DeviceId(GPU, WHOLE)),
        (f"{GPU}::c17", DeviceId(GPU, VGPU.core_unit, 17)),
        (f"{GPU}::m42", DeviceId(GPU, VGPU.memory_unit, 42)),
        (f"{GPU}::sc0", DeviceId(GPU, MPS.core_unit, 0)),
        (f"{GPU}::sm3", DeviceId(GPU, MPS.memory_unit, 3)),
        (f"{GPU}::r3", DeviceId(GPU, REPLICA, 3)),
    ],
)
def test_the_public_spelling(text: str, expected: DeviceId) -> None:
    assert parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "::c1",
        f"{GPU}::x1",
        f"{GPU}::c",
        f"{GPU}::1",
        f"{GPU}::c01",
        f"{GPU}::c-1",
        f"{GPU}::c1::c2",
        "x" * 64,
    ],
)
def test_what_no_resource_sells_is_refused(text: str) -> None:
    with pytest.raises(BadDeviceId):
        parse(text)


def test_a_refusal_names_the_id_shortened() -> None:
    with pytest.raises(BadDeviceId, match="xxx") as caught:
        parse("x" * 100_000)
    assert len(str(caught.value)) < 200


def test_the_longest_id_that_is_sold_fits() -> None:
    assert len(str(DeviceId(f"GPU-{uuid.UUID(int=0)}", MPS.memory_unit, 99_999))) <= LONGEST
