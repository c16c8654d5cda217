"""PodResources v1: the kubelet's own record of who holds which device IDs, and which kubelet it is of."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import anyio
from grpclib.client import Channel, Handler, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent._proto import v1
from agent.kit.tasks import Backoff
from agent.kubelet import wire
from agent.kubelet.grpc_server import CorkedProtocol
from agent.model.holding import Holding, Record, Source
from agent.model.resource_claim import DRIVER, share_of

# `kubelet.sock`: whether a kubelet serves there, and whether it is still the same one.

CONNECT_SECONDS = 1.0

# Inode and time of change: a kubelet makes its socket again at each start, often with the same inode.
Identity = tuple[int, int]


class KubeletSocket:
    """The socket that every kubelet makes again when it starts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def identity(self) -> Identity | None:
        """Which socket file lies there; None: none. The kubelet leaves it behind when it ends."""
        with suppress(OSError):
            found = await anyio.Path(self.path).stat()
            return found.st_ino, found.st_ctime_ns
        return None

    async def serves(self) -> Identity | None:
        """The identity of the socket file if somebody accepts connections there, else None."""
        before = await self.identity()
        with anyio.move_on_after(CONNECT_SECONDS), suppress(OSError):
            async with await anyio.connect_unix(self.path):
                return before
        return None


# PodResources v1: the kubelet's own record of which container holds which device IDs.

T = TypeVar("T")

# The socket takes 100 calls a second, burst 10, from everybody on the node together.
LIST_SECONDS = 2.0
# Within a call of the kubelet, which sets no deadline: late answers delay pods, a refusal ends one for good.
PATIENCE_SECONDS = 15.0


# What a kubelet says to a call that it has not, or that is turned off in it (1.21, 1.22: a plain Go error).
UNSUPPORTED = (Status.UNIMPLEMENTED, Status.UNKNOWN)


class PodResourcesUnavailable(Exception):
    """The kubelet did not answer; the text says what was tried and what was said."""

    def __init__(self, message: str, *, unsupported: bool = False) -> None:
        """`unsupported`: it did answer, and does not offer the call."""
        self.unsupported = unsupported
        super().__init__(message)


# What one pod's part of a list says: holdings, and all containers.
_Part = tuple[list[Holding], list[tuple[str, str, str]]]


class Reader:
    """Reads one list after the other; pods whose bytes did not change since the last are not read again.

    Unchanged holdings are the very same objects, so that what was derived from them can be kept, too.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, _Part] = {}

    def parse(self, data: bytes) -> Record:
        fresh: dict[bytes, _Part] = {}
        parts: list[_Part] = []
        for start, end in wire.submessages(data, 0, len(data), 1):
            body = data[start:end]
            part = self._known.get(body) or _read_pod(body, 0, len(body))
            fresh[body] = part
            parts.append(part)
        self._known = fresh
        return _joined(parts)


class AllocatableReader:
    """AllocatableResourcesResponse: how many different healthy IDs there are of each resource."""

    def parse(self, data: bytes) -> Mapping[str, int]:
        # An ID with two NUMA nodes has two entries.
        found = _read_entries(data, 0, len(data), entries=1).held
        return {resource: len(set(ids)) for resource, ids in found.items()}


def _joined(parts: Iterable[_Part]) -> Record:
    holdings: list[Holding] = []
    containers: list[tuple[str, str, str]] = []
    for held, names in parts:
        holdings += held
        containers += names
    return Record(tuple(holdings), tuple(containers))


class _Channel(Channel):
    def _protocol_factory(self) -> CorkedProtocol:
        return CorkedProtocol(Handler(), self._config, self._h2_config)


class PodResources:
    """Client of the kubelet's PodResources socket.

    A fresh connection for each call, or one for all of them inside `keeping_connection`.
    """

    def __init__(self, kubelet_root: Path) -> None:
        self.path = kubelet_root / "pod-resources" / "kubelet.sock"
        self._reader = Reader()
        self._keep = False
        self._kept: Channel | None = None

    @contextmanager
    def keeping_connection(self) -> Iterator[None]:
        """Inside, calls share one connection: setting one up costs as much as a small answer."""
        self._keep = True
        try:
            yield
        finally:
            self._keep = False
            self._drop()

    def _drop(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    async def list(self, deadline: float = LIST_SECONDS) -> Record:
        """All containers and what they hold. Raises PodResourcesUnavailable after `deadline` seconds at most.

        The kubelet's rate limit is waited out within the deadline.
        """
        return await self._asked("List", self._reader, deadline)

    async def allocatable(self, deadline: float = LIST_SECONDS) -> Mapping[str, int]:
        """How many healthy devices the kubelet knows of each resource, free or not. Raises as `list` does."""
        return await self._asked("GetAllocatableResources", AllocatableReader(), deadline)

    async def _asked(self, call: str, parser: wire.Parser[T], deadline: float) -> T:
        backoff = Backoff(first=0.012, longest=0.2)
        said, unsupported = "no answer", False
        with anyio.move_on_after(deadline):
            while True:
                reused = self._kept is not None
                try:
                    return await self._ask(call, parser)
                except GRPCError as error:
                    said = f"{error.message} ({error.status.name})"
                    if error.status is not Status.RESOURCE_EXHAUSTED:
                        unsupported = error.status in UNSUPPORTED
                        break
                except (OSError, wire.MalformedMessage) as error:
                    said = str(error) or type(error).__name__
                    if reused:
                        continue  # the kubelet that was at the other end may be gone, and another there
                    break
                await anyio.sleep(backoff.next())
        text = f"PodResources {call} on {self.path}: {said}; is the kubelet running?"
        raise PodResourcesUnavailable(text, unsupported=unsupported)

    async def _ask(self, call: str, parser: wire.Parser[T]) -> T:
        channel = self._kept or _Channel(path=str(self.path), codec=wire.Codec())
        # Until the call has ended well nobody else may use it.
        self._kept = None
        try:
            # The codec asks the type of the answer for no more than `parse`.
            answer = cast("type[T]", parser)
            # The requests of both calls are empty messages.
            method: UnaryUnaryMethod[v1.ListPodResourcesRequest, T] = UnaryUnaryMethod(
                channel, f"/v1.PodResourcesLister/{call}", v1.ListPodResourcesRequest, answer
            )
            # Without a timeout of grpclib: it cancels the task and never takes that back, so that one which
            # falls together with the deadline of a scope outlives both and ends whatever comes next.
            with _connection_may_be_lost():
                found = await method(v1.ListPodResourcesRequest())
        except BaseException:
            channel.close()
            raise
        if self._keep and self._kept is None:
            self._kept = channel
        else:
            channel.close()
        return found


@contextmanager
def _connection_may_be_lost() -> Iterator[None]:
    """Takes back what grpclib leaves behind when a stream is lost. Raises ConnectionResetError or GRPCError.

    It cancels the task that waits for an answer (`grpclib.utils.Wrapper`) and never takes that back: the next
    deadline of a scope that was entered before would end the task. A connection that is lost before its
    first use has no transport any more, which comes out as an AttributeError.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    except (StreamTerminatedError, GRPCError) as error:
        if task.cancelling() > before:
            task.uncancel()
        if isinstance(error, GRPCError):
            raise  # the answer came together with the end of its stream
        raise ConnectionResetError(str(error) or "the connection was lost") from error
    except AttributeError as error:
        if error.name != "_transport":
            raise
        raise ConnectionResetError("the connection was lost at once") from error


def _read_pod(data: bytes, start: int, end: int) -> _Part:
    holdings: list[Holding] = []
    containers: list[tuple[str, str, str]] = []
    name = namespace = ""
    bodies: list[tuple[int, int]] = []
    for number, kind, low, high in wire.fields(data, start, end):
        if kind != 2:
            continue
        if number == 1:
            name = wire.text(data, low, high)
        elif number == 2:
            namespace = wire.text(data, low, high)
        elif number == 3:
            bodies.append((low, high))
    for low, high in bodies:
        found = _read_entries(data, low, high, entries=2, name=1, claims=5)
        holder = (namespace, name, found.name)
        containers.append(holder)
        holdings += (Holding(*holder, resource, wire.texts(ids)) for resource, ids in found.held.items())
        holdings += _read_claims(data, found.claims, holder)
    return holdings, containers


def _read_claims(
    data: bytes, spans: Sequence[tuple[int, int]], holder: tuple[str, str, str]
) -> Iterator[Holding]:
    """Devices of our driver that a container has by claims, each of which is a DynamicResource."""
    for low, high in spans:
        claim, resources = "", list[tuple[int, int]]()
        for number, kind, at, to in wire.fields(data, low, high):
            if kind == 2 and number == 2:
                claim = wire.text(data, at, to)
            elif kind == 2 and number == 4:
                resources.append((at, to))
        for at, to in resources:
            texts: dict[int, str] = {}
            cdi: list[str] = []
            for number, kind, first, last in wire.fields(data, at, to):
                if kind == 2 and number == 1:
                    cdi += [wire.text(data, a, b) for a, b in wire.submessages(data, first, last, 1)]
                elif kind == 2:
                    texts[number] = wire.text(data, first, last)
            share = share_of(texts.get(4, ""), cdi, claim, texts.get(5, ""))
            if share and texts.get(2) == DRIVER:
                yield Holding(*holder, DRIVER, (), Source.CLAIM, share)


@dataclass(slots=True)
class _Entries:
    """A message with ContainerDevices, read: IDs by resource, and where its DynamicResources stand."""

    name: str = ""
    held: dict[str, list[bytes]] = field(default_factory=dict)
    claims: list[tuple[int, int]] = field(default_factory=list)


def _read_entries(
    data: bytes, start: int, end: int, *, entries: int, name: int = 0, claims: int = 0
) -> _Entries:
    """`entries`, `name`, `claims`: the numbers of fields."""
    read = _Entries()
    held = read.held
    at = start
    while at < end:
        number, kind, low, high, after = wire.field_at(data, at, end)
        if number == name and kind == 2:
            read.name = wire.text(data, low, high)
        elif number == claims and kind == 2:
            read.claims.append((low, high))
        elif number == entries and kind == 2:
            resource, ids, begin = _read_devices(data, low, high)
            if ids:
                found = held.setdefault(resource, [])
                found.extend(ids)
                if begin:
                    # The kubelet sends one entry for each ID, and those of one resource in a row: as long as
                    # the bytes before the ID are the same, the whole entry has the same shape.
                    head, length = data[at:begin], after - at
                    offset = begin - at
                    at = after
                    while at + length <= end and data.startswith(head, at):
                        found.append(data[at + offset : at + length])
                        at += length
                    continue
        at = after
    return read


def _read_devices(data: bytes, start: int, end: int) -> tuple[str, list[bytes], int]:
    """Resource, IDs, and where the ID begins if it is the only one and the last of the entry; else 0."""
    resource = ""
    ids: list[bytes] = []
    begin = 0
    for number, kind, low, high in wire.fields(data, start, end):
        begin = 0
        if kind == 2 and number == 1:
            resource = wire.text(data, low, high)
        elif kind == 2 and number == 2:
            ids.append(data[low:high])
            begin = low if high == end and len(ids) == 1 else 0
    return resource, ids, begin
