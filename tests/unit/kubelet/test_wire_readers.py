"""Readers and writers by hand agree with betterproto2: fields in any order, repeated, unknown."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent._proto import v1, v1beta1
from agent.kubelet.podresources import AllocatableReader, Reader
from agent.kubelet.wire import (
    Allocation,
    AllocationRequests,
    DeviceNode,
    MalformedMessage,
    Mount,
    PreferenceRequest,
    PreferenceRequests,
    allocations,
    preferences,
)
from agent.model.holding import Holding, Record

Field = tuple[int, int, bytes]  # number, wire type, encoded value


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(number: int, wire: int, value: bytes) -> bytes:
    body = varint(len(value)) + value if wire == 2 else value
    return varint(number << 3 | wire) + body


def message(fields: Sequence[Field]) -> bytes:
    return b"".join(field(*each) for each in fields)


NUMBERS = st.integers(0, 2**64 - 1).map(varint)
UNKNOWN: st.SearchStrategy[Field] = st.sampled_from([14, 15, 16, 2047, 100_000]).flatmap(
    lambda number: st.one_of(
        st.tuples(st.just(number), st.just(0), NUMBERS),
        st.tuples(st.just(number), st.just(1), st.binary(min_size=8, max_size=8)),
        st.tuples(st.just(number), st.just(2), st.binary(max_size=200)),
        st.tuples(st.just(number), st.just(5), st.binary(min_size=4, max_size=4)),
    )
)
GPU = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50"
RESOURCES = ["tencent.com/vcuda-core", "tencent.com/vcuda-memory", "nvidia.com/gpu", ""]
IDS = st.one_of(
    st.integers(0, 1200).map(lambda n: f"{GPU}::m{n}"),
    st.text(max_size=12),
    st.text(min_size=100, max_size=200),
)


def encoded(text: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    return text.map(str.encode)


def one(number: int, value: st.SearchStrategy[bytes]) -> st.SearchStrategy[Field]:
    return st.tuples(st.just(number), st.just(2), value)


def made_of(*parts: st.SearchStrategy[Field], most: int = 6) -> st.SearchStrategy[bytes]:
    """Messages of such fields, unknown ones among them, each any number of times in any order."""
    return st.lists(st.one_of(*parts, UNKNOWN), max_size=most).map(message)


TOPOLOGY = made_of(one(1, made_of(st.tuples(st.just(1), st.just(0), NUMBERS), most=2)), most=2)
DEVICES = made_of(one(1, encoded(st.sampled_from(RESOURCES))), one(2, encoded(IDS)), one(3, TOPOLOGY), most=4)


@st.composite
def runs(draw: st.DrawFn, longest: int = 120) -> list[Field]:
    """Entries as the kubelet sends them: one per ID, those of one resource in a row."""
    resource = draw(st.sampled_from(RESOURCES))
    first, count = draw(st.integers(0, 1100)), draw(st.integers(0, longest))
    tail = draw(st.sampled_from([b"", message([(3, 2, message([(1, 2, b"\x08\x01")]))])]))
    ids = [f"{GPU}::m{n}".encode() for n in range(first, first + count)]
    return [(2, 2, message([(1, 2, resource.encode()), (2, 2, each)]) + tail) for each in ids]


@st.composite
def containers(draw: st.DrawFn, longest: int = 120) -> bytes:
    loose = st.one_of(one(1, encoded(st.sampled_from(["main", "second", ""]))), one(2, DEVICES), UNKNOWN)
    parts = draw(st.lists(st.one_of(loose.map(lambda each: [each]), runs(longest)), max_size=5))
    return message([each for part in parts for each in part])


def pods(containers: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return made_of(
        one(1, encoded(st.sampled_from(["a", "b", ""]))),
        one(2, encoded(st.just("default"))),
        one(3, containers),
    )


LISTS = made_of(one(1, pods(containers())), most=4)
# Several of them make one example. Filtering large ones out instead leaves so few that Hypothesis gives up.
SHORT_LISTS = made_of(one(1, pods(containers(longest=6))), most=3)


def as_pod_list(data: bytes) -> Record:
    """The answer as betterproto2 reads it, in our types."""
    holdings: list[Holding] = []
    names: list[tuple[str, str, str]] = []
    for pod in v1.ListPodResourcesResponse.parse(data).pod_resources:
        for container in pod.containers:
            names.append((pod.namespace, pod.name, container.name))
            held: dict[str, list[str]] = {}
            for entry in container.devices:
                if entry.device_ids:
                    held.setdefault(entry.resource_name, []).extend(entry.device_ids)
            holdings.extend(
                Holding(pod.namespace, pod.name, container.name, resource, tuple(ids))
                for resource, ids in held.items()
            )
    return Record(tuple(holdings), tuple(names))


@given(LISTS)
@example(b"")
def test_pod_lists(data: bytes) -> None:
    assert Reader().parse(data) == as_pod_list(data)


@given(LISTS, LISTS)
def test_pod_lists_that_come_in_two_parts(first: bytes, second: bytes) -> None:
    assert Reader().parse(first + second) == as_pod_list(first + second)


@st.composite
def allocatable(draw: st.DrawFn) -> bytes:
    loose = st.one_of(one(1, DEVICES), UNKNOWN).map(lambda each: [each])
    kubelets = runs().map(lambda entries: [(1, kind, body) for _, kind, body in entries])
    parts = draw(st.lists(st.one_of(loose, kubelets), max_size=5))
    return message([each for part in parts for each in part])


@given(allocatable())
def test_counts_of_healthy_devices(data: bytes) -> None:
    found: dict[str, set[str]] = {}
    for entry in v1.AllocatableResourcesResponse.parse(data).devices:
        if entry.device_ids:
            found.setdefault(entry.resource_name, set()).update(entry.device_ids)
    assert AllocatableReader().parse(data) == {name: len(ids) for name, ids in found.items()}


PREFERENCE = made_of(
    one(1, encoded(IDS)), one(2, encoded(IDS)), st.tuples(st.just(3), st.just(0), NUMBERS), most=12
)


@given(made_of(one(1, PREFERENCE), most=3))
@example(b"")
def test_preference_requests(data: bytes) -> None:
    theirs = v1beta1.PreferredAllocationRequest.parse(data)
    assert PreferenceRequests.parse(data).containers == tuple(
        PreferenceRequest(
            tuple(each.available_device_ids), tuple(each.must_include_device_ids), each.allocation_size
        )
        for each in theirs.container_requests
    )


@given(made_of(one(1, made_of(one(1, encoded(IDS)), most=12)), most=3))
@example(b"")
def test_allocation_requests(data: bytes) -> None:
    theirs = v1beta1.AllocateRequest.parse(data)
    assert AllocationRequests.parse(data).containers == tuple(
        tuple(each.devices_ids) for each in theirs.container_requests
    )


@given(st.one_of(LISTS, made_of(one(1, PREFERENCE))), st.data())
def test_damaged_messages_are_refused_or_read_but_never_crash(data: bytes, more: st.DataObject) -> None:
    cut = more.draw(st.integers(0, len(data)))
    flipped = bytearray(data)
    if flipped:
        flipped[more.draw(st.integers(0, len(data) - 1))] ^= more.draw(st.integers(1, 255))
    for damaged in (data[:cut], bytes(flipped)):
        for reader in (Reader(), PreferenceRequests, AllocationRequests):
            try:
                reader.parse(damaged)
            except MalformedMessage:
                continue


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",  # a length is missing
        b"\x0a\x05ab",  # the value is cut off
        b"\x0a\x03\x0a\x02a",  # an inner value is cut off
        b"\x0a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",  # a length of eleven bytes
        b"\x0b",  # groups are not in use
        b"\x02\x00",  # field number 0
    ],
)
def test_broken_messages_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        Reader().parse(data)


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="UTF-8"):
        AllocationRequests.parse(message([(1, 2, message([(1, 2, b"\xff\xfe")]))]))


def test_an_entry_that_only_begins_like_its_neighbour_is_read_by_itself() -> None:
    first = message([(1, 2, b"r"), (2, 2, b"GPU::m1")])
    other = message([(1, 2, b"s"), (2, 2, b"GPU::m2")])
    data = message([(1, 2, message([(3, 2, message([(2, 2, first), (2, 2, other), (2, 2, first)]))]))])
    assert Reader().parse(data) == as_pod_list(data)
    assert [each.ids for each in Reader().parse(data).holdings] == [("GPU::m1", "GPU::m1"), ("GPU::m2",)]


@given(st.lists(SHORT_LISTS, min_size=1, max_size=4))
def test_a_reader_that_remembers_reads_the_same(messages: list[bytes]) -> None:
    reader = Reader()
    for data in (*messages, *reversed(messages)):
        assert reader.parse(data) == as_pod_list(data)


def test_what_did_not_change_is_the_same_object() -> None:
    first, second = (
        message([(1, 2, message([(1, 2, name), (3, 2, message([(1, 2, b"main"), (2, 2, entry)]))]))])
        for name, entry in (
            (b"a", message([(1, 2, b"r"), (2, 2, b"GPU::m1")])),
            (b"b", message([(1, 2, b"r"), (2, 2, b"GPU::m2")])),
        )
    )
    reader = Reader()
    before = reader.parse(first)
    after = reader.parse(second + first)
    assert after.holdings[1] is before.holdings[0]


TEXTS = st.one_of(st.text(max_size=12), st.text(min_size=120, max_size=140))
PAIRS = st.dictionaries(TEXTS, TEXTS, max_size=3)


@given(
    st.lists(
        st.builds(
            Allocation,
            PAIRS,
            st.lists(st.builds(Mount, TEXTS, TEXTS, st.booleans()), max_size=3).map(tuple),
            st.lists(st.builds(DeviceNode, TEXTS, TEXTS, TEXTS), max_size=3).map(tuple),
            PAIRS,
            st.lists(TEXTS, max_size=3).map(tuple),
        ),
        max_size=3,
    )
)
def test_an_allocation_is_read_as_it_was_meant(granted: list[Allocation]) -> None:
    read = v1beta1.AllocateResponse.parse(allocations(granted)).container_responses
    assert [
        Allocation(
            each.envs,
            tuple(Mount(one.container_path, one.host_path, one.read_only) for one in each.mounts),
            tuple(DeviceNode(one.container_path, one.host_path, one.permissions) for one in each.devices),
            each.annotations,
            tuple(one.name for one in each.cdi_devices),
        )
        for each in read
    ] == granted


@given(st.lists(st.lists(IDS, max_size=4), max_size=3))
def test_a_preference_is_read_as_it_was_meant(chosen: list[list[str]]) -> None:
    read = v1beta1.PreferredAllocationResponse.parse(preferences(chosen)).container_responses
    assert [each.device_ids for each in read] == chosen
