"""Messages of the kubelet, and a resource as it sees it in the agent's own frozen types.

Messages come and go through betterproto2, except the three that can hold thousands of device IDs and the two
answers that a pod waits for: those are read and written by hand, 15 to 100 times as fast (docs/decisions.md),
and tested to agree with betterproto2. Lists of devices arrive here already encoded and pass through.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Protocol, TypeVar

from grpclib.encoding.base import CodecBase
from h2.connection import H2Connection
from h2.frame_buffer import FrameBuffer
from hyperframe.frame import DataFrame, Frame, HeadersFrame

from agent._proto import v1beta1
from agent.kit.tasks import Cell
from agent.model.modes import LONGEST, Assignment

# A resource as the kubelet sees it, in the agent's own frozen types: wire messages stay behind it.


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of the host in a container."""

    container_path: str
    host_path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node of the host shown in the container; `permissions` out of r, w and m."""

    container_path: str
    host_path: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer for a container's device IDs of one resource."""

    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()  # qualified names, vendor/class=device


def joined(*parts: Allocation) -> Allocation:
    """The parts together; where several set a variable or an annotation, the last one counts."""
    return Allocation(
        environment={name: value for part in parts for name, value in part.environment.items()},
        mounts=tuple(each for part in parts for each in part.mounts),
        device_nodes=tuple(each for part in parts for each in part.device_nodes),
        annotations={name: value for part in parts for name, value in part.annotations.items()},
        cdi_devices=tuple(each for part in parts for each in part.cdi_devices),
    )


@dataclass(frozen=True, slots=True)
class PreferenceRequest:
    """The kubelet asks which `size` of the `available` IDs a container should get; advice, not law."""

    available: tuple[str, ...]
    must_include: tuple[str, ...]
    size: int


class Reason(Enum):
    """Why a request is refused; the value is the gRPC status of the answer."""

    INVALID = "INVALID_ARGUMENT"  # asking again will not help
    EXHAUSTED = "RESOURCE_EXHAUSTED"  # no GPU has room
    UNAVAILABLE = "UNAVAILABLE"  # a part of the agent or the node is not ready
    LATE = "DEADLINE_EXCEEDED"


class Refused(Exception):
    """A request that is not granted. The text reaches the pod's status: it names object, cause and remedy."""

    def __init__(self, message: str, reason: Reason = Reason.INVALID) -> None:
        self.reason = reason
        super().__init__(message)


class ResourcePlugin(Protocol):
    """One resource as it is advertised and handed out."""

    resource: str  # "nvidia.com/gpu"
    offers_preference: bool
    needs_pre_start: bool
    # The newest ListAndWatchResponse, encoded. Every publication goes to the kubelet as it is.
    lists: Cell[bytes]

    async def run(self) -> None:
        """Keep `lists` true, for ever."""

    def refresh(self) -> None:
        """Bring `lists` up to date now, rather than when the plugin's own task gets its turn."""

    def figures(self, assignment: Assignment) -> tuple[int, int]:
        """Capacity and allocatable, as the kubelet would count them, if `assignment` were in force."""

    async def prefer(self, request: PreferenceRequest) -> Sequence[str]:
        """Choose IDs; raises Refused. Blocks every pod of the node while it runs."""

    async def allocate(self, ids: Sequence[str]) -> Allocation:
        """Hand IDs to a container; raises Refused. Blocks every pod of the node while it runs."""

    async def pre_start(self, ids: Sequence[str]) -> None:
        """Last act before a container starts; raises Refused. The kubelet gives it 30 s and tries again."""


# The codec between grpclib and this room.

T_co = TypeVar("T_co", covariant=True)

# A connection remembers why its last calls were closed, for frames of them that come late. By default
# those are 65,536, which take 11 MiB for each connection of the agent's life. A kubelet makes few at a time.
H2Connection.MAX_CLOSED_STREAMS = 128
# h2 describes each frame that it receives, all of its bytes in hexadecimal, for a logger that drops the text:
# a third of the processor time of a long list.
Frame.__repr__ = object.__repr__  # type: ignore[method-assign]


END_STREAM = 0x1  # of frames of data and headers
HEAD = 9  # bytes before a frame's body: three of its length, type, flags, four of its stream


class DataInRuns(FrameBuffer):
    """Frames as h2 reads them, but data of one stream in a row as one frame: where it is cut says nothing.

    The kubelet sends a long list in pieces of 16 KiB, each of which costs h2 and grpclib 50 µs.
    """

    def __next__(self) -> Frame:
        frame = super().__next__()
        # Neither padded nor the last of its stream.
        if isinstance(frame, DataFrame) and frame.data and not frame.flags:
            data, bodies, at = self._data, [frame.data], 0
            alike = bytes((frame.type, 0)) + frame.stream_id.to_bytes(4, "big")
            while data.startswith(alike, at + 3):
                length = int.from_bytes(data[at : at + 3], "big")
                stop = at + HEAD + length
                if not 0 < length <= self.max_frame_size or stop > len(data):
                    break
                bodies.append(bytes(data[at + HEAD : stop]))
                at = stop
            del data[:at]
            frame.data = b"".join(bodies)
        return frame


def ends_stream(frames: bytes | bytearray | memoryview) -> bool:
    """Whether one of these whole frames is the last of its stream."""
    at = 0
    while at + HEAD <= len(frames):
        if frames[at + 3] in (DataFrame.type, HeadersFrame.type) and frames[at + 4] & END_STREAM:
            return True
        at += HEAD + int.from_bytes(frames[at : at + 3], "big")
    return False


class MalformedMessage(ValueError):
    """Bytes that are not the protocol buffer message that was expected."""


class Parser(Protocol[T_co]):
    """A message type that grpclib is given: anything with `parse`."""

    def parse(self, data: bytes) -> T_co:
        """Read one message. Raises MalformedMessage."""


class Codec(CodecBase):
    """Encodes betterproto2 messages, passes bytes through; decodes by the message type's `parse`."""

    __content_subtype__ = "proto"

    def encode(self, message: object, message_type: object) -> bytes:  # noqa: ARG002  grpclib's signature
        return message if isinstance(message, bytes) else bytes(message)  # type: ignore[call-overload]

    def decode(self, data: bytes, message_type: Parser[object]) -> object:
        return message_type.parse(data)


@dataclass(frozen=True, slots=True)
class PreferenceRequests:
    """PreferredAllocationRequest, read by hand."""

    containers: tuple[PreferenceRequest, ...]

    @classmethod
    def parse(cls, data: bytes) -> "PreferenceRequests":
        return cls(tuple(_preference(data, a, b) for a, b in submessages(data, 0, len(data), 1)))


@dataclass(frozen=True, slots=True)
class AllocationRequests:
    """AllocateRequest, read by hand: the device IDs of each container."""

    containers: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, data: bytes) -> "AllocationRequests":
        return cls(tuple(_ids(data, start, end) for start, end in submessages(data, 0, len(data), 1)))


def _preference(data: bytes, start: int, end: int) -> PreferenceRequest:
    available: list[bytes] = []
    must_include: list[bytes] = []
    size = 0
    at = start
    while at < end:
        if data[at] == TEXT_1 and (stop := short_end(data, at, end)):
            at = texts_alike(data, at, stop, end, available)
            continue
        number, wire, low, high, at = field_at(data, at, end)
        if number == 1 and wire == 2:
            available.append(data[low:high])
        elif number == 2 and wire == 2:
            must_include.append(data[low:high])
        elif number == 3 and wire == 0:
            size = _int32(low)
    return PreferenceRequest(texts(available), texts(must_include), size)


def _ids(data: bytes, start: int, end: int) -> tuple[str, ...]:
    """The texts of field 1, and nothing else, of a message."""
    found: list[bytes] = []
    at = start
    while at < end:
        if data[at] == TEXT_1 and (stop := short_end(data, at, end)):
            at = texts_alike(data, at, stop, end, found)
            continue
        number, wire, low, high, at = field_at(data, at, end)
        if number == 1 and wire == 2:
            found.append(data[low:high])
    return texts(found)


TEXT_1 = 0x0A  # the key of field 1 with wire type 2


def short_end(data: bytes, at: int, end: int) -> int:
    """Where a value with a length below 128 ends, whose one-byte key stands at `at`; 0: take the long way."""
    length = data[at + 1] if at + 1 < end else 128
    stop = at + 2 + length
    return stop if length < 128 and stop <= end else 0


def texts_alike(data: bytes, at: int, stop: int, end: int, found: list[bytes]) -> int:
    """Take the short field in data[at:stop] and those after it of the same key and length; where they end."""
    head, step = data[at : at + 2], stop - at
    while stop <= end and data.startswith(head, at):
        found.append(data[at + 2 : stop])
        at, stop = stop, stop + step
    return at


def submessages(data: bytes, start: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    for number, wire, low, high in fields(data, start, end):
        if number == wanted and wire == 2:
            yield low, high


def fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message that stands in data[start:end], as `field_at` returns them."""
    at = start
    while at < end:
        number, wire, low, high, at = field_at(data, at, end)
        yield number, wire, low, high


def field_at(data: bytes, at: int, end: int) -> tuple[int, int, int, int, int]:
    """The field that begins at `at` of a message that ends at `end`: number, wire type, two figures, next.

    For wire type 2 (text, bytes, messages) the figures are the bounds of the value; for 0 the value
    and 0; for 1 and 5 the bounds again. Raises MalformedMessage. Source: the protocol buffer
    encoding guide.
    """
    key, at = _varint(data, at, end)
    number, wire = key >> 3, key & 7
    if number == 0:
        raise MalformedMessage("field number 0 is not in use")
    if wire == 0:
        value, at = _varint(data, at, end)
        return number, 0, value, 0, at
    if wire == 2:
        length, at = _varint(data, at, end)
    elif wire in (1, 5):
        length = 8 if wire == 1 else 4
    else:
        raise MalformedMessage(f"wire type {wire} is not in use")
    if at + length > end:
        raise MalformedMessage("a field reaches beyond its message")
    return number, wire, at, at + length, at + length


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    if at >= end:
        raise MalformedMessage("the message is cut off")
    first = data[at]
    return (first, at + 1) if first < 128 else _varint_rest(data, at + 1, end, first)


def _varint_rest(data: bytes, at: int, end: int, first: int) -> tuple[int, int]:
    value, shift = first & 127, 7
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
        if shift > 63:
            break
    raise MalformedMessage("a number is cut off or longer than ten bytes")


def _int32(value: int) -> int:
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low & 0x80000000 else low


def text(data: bytes, start: int, end: int) -> str:
    try:
        return str(data[start:end], "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedMessage("a text is not UTF-8") from error


def texts(values: list[bytes]) -> tuple[str, ...]:
    try:
        return tuple([value.decode() for value in values])
    except UnicodeDecodeError as error:
        raise MalformedMessage("a text is not UTF-8") from error


def allocations(containers: Iterable[Allocation]) -> bytes:
    """AllocateResponse."""
    return b"".join(_message(1, _allocation(each)) for each in containers)


def preferences(containers: Iterable[Iterable[str]]) -> bytes:
    """PreferredAllocationResponse: the chosen device IDs of each container."""
    return b"".join(_message(1, b"".join(_text(1, device) for device in ids)) for ids in containers)


def _allocation(allocation: Allocation) -> bytes:
    parts = [_message(1, _text(1, name) + _text(2, value)) for name, value in allocation.environment.items()]
    parts += [
        _message(2, _text(1, mount.container_path) + _text(2, mount.host_path) + TRUE_3 * mount.read_only)
        for mount in allocation.mounts
    ]
    parts += [
        _message(3, _text(1, node.container_path) + _text(2, node.host_path) + _text(3, node.permissions))
        for node in allocation.device_nodes
    ]
    parts += [_message(4, _text(1, name) + _text(2, value)) for name, value in allocation.annotations.items()]
    parts += [_message(5, _text(1, name)) for name in allocation.cdi_devices]
    return b"".join(parts)


TRUE_3 = b"\x18\x01"  # a field 3 that is true; one that is false is left out


def _text(number: int, value: str) -> bytes:
    return _message(number, value.encode())


def _message(number: int, body: bytes) -> bytes:
    """A field of wire type 2: a text or a message."""
    length, head = len(body), bytearray((number << 3 | 2,))
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head) + body


# Device lists as bytes.
#
# A ListAndWatchResponse is the concatenation of its devices' encodings, so each device is encoded once per
# state and a list is a join: sending a changed list costs next to nothing.

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"


@lru_cache(maxsize=256)
def device(device_id: str, healthy: bool, numa_node: int | None) -> bytes:
    """One device as a ListAndWatchResponse of one; concatenate them for a list.

    `numa_node` None leaves the topology field out: the kubelet then gives no NUMA hints.
    """
    topology = None if numa_node is None else v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=numa_node)])
    item = v1beta1.Device(id=device_id, health=HEALTHY if healthy else UNHEALTHY, topology=topology)
    return bytes(v1beta1.ListAndWatchResponse(devices=[item]))


def devices(ids: Iterable[str], healthy: bool) -> bytes:
    """Many devices without topology, as a ListAndWatchResponse: a thousand in a third of a millisecond.

    By hand, since IDs of one GPU differ in their number alone: field 1 of the list holds a device, whose
    field 1 is its ID and field 2 its health. IDs are too short for lengths of two bytes.
    """
    health = (HEALTHY if healthy else UNHEALTHY).encode()
    tail = b"\x12" + bytes((len(health),)) + health
    heads = [
        b"\n" + bytes((length + 2 + len(tail),)) + b"\n" + bytes((length,)) for length in range(LONGEST + 1)
    ]
    return b"".join([heads[len(each)] + each.encode() + tail for each in ids])
