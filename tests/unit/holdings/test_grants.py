"""Grants count until a reading could have shown them, by what the plugin's service answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from grpclib.exceptions import GRPCError

from agent.kit.tasks import Cell
from agent.kubelet import service as service_module
from agent.kubelet.service import GRANT_SECONDS, UNWRITTEN_SECONDS, DevicePluginService
from agent.kubelet.wire import Allocation, PreferenceRequest, Refused
from agent.model.holding import Holding, Record, Source

IDS = ["a", "b"]


class Plugin:
    """Grants whatever it is asked for."""

    resource, lists, needs_pre_start, offers_preference = "r", Cell(b""), False, True

    async def allocate(self, _: Sequence[str]) -> Allocation:
        return Allocation()

    async def prefer(self, _: object) -> Sequence[str]:
        return IDS


class Stream:
    """A call of the kubelet, which takes its time to read the answer."""

    def __init__(self, send: Callable[[], None], request: object = IDS) -> None:
        self._send = send
        self._request = request

    async def recv_message(self) -> Any:
        return SimpleNamespace(containers=[self._request])

    async def send_message(self, _: object) -> None:
        self._send()


@pytest.mark.parametrize("call", ["_allocate", "_preferred"])
@pytest.mark.parametrize("lost", [False, True])
async def test_a_grant_outlives_readings_that_began_before_its_answer_had_left(
    monkeypatch: pytest.MonkeyPatch, call: str, lost: bool
) -> None:
    clock, read = [100.0], [0.0]
    monkeypatch.setattr(
        service_module, "time", SimpleNamespace(monotonic=lambda: clock[0], perf_counter=lambda: 0.0)
    )
    service = DevicePluginService(Plugin(), read=lambda: Record(began=read[0], written=read[0]))  # type: ignore[arg-type]
    during: list[frozenset[str]] = []

    def send() -> None:
        clock[0] += 3 * GRANT_SECONDS
        read[0] = clock[0]
        during.append(service.granted_lately())
        if lost:
            raise ConnectionResetError

    try:
        request = PreferenceRequest(tuple(IDS), (), len(IDS)) if call == "_preferred" else IDS
        await getattr(service, call)(Stream(send, request))
    except ConnectionResetError:
        assert lost  # whether the kubelet has read it is not known
    assert during == [set(IDS)]
    assert service.granted_lately() == set(IDS)
    read[0] = clock[0] + 1.5 * GRANT_SECONDS
    assert not service.granted_lately()


async def test_a_call_that_was_refused_hands_nothing_out() -> None:
    class Refusing(Plugin):
        async def allocate(self, _: Sequence[str]) -> Allocation:
            raise Refused("not today")

    service = DevicePluginService(Refusing())  # type: ignore[arg-type]
    with pytest.raises(GRPCError):
        await service._allocate(Stream(lambda: None))  # type: ignore[arg-type]
    assert not service.granted_lately()


async def test_grants_do_not_pile_up_while_nothing_can_be_read() -> None:
    service = DevicePluginService(Plugin())  # type: ignore[arg-type]
    for _ in range(100):
        await service._allocate(Stream(lambda: None))  # type: ignore[arg-type]
    assert len(service._granted) == len(IDS)


@dataclass
class Granted:
    """IDs that were handed out at second 100, and what is read of the kubelet's record later."""

    monkeypatch: pytest.MonkeyPatch
    record: Record = field(default_factory=lambda: Record(began=99.0, written=90.0))

    def __post_init__(self) -> None:
        self.clock = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.clock, perf_counter=lambda: 0.0)
        self.monkeypatch.setattr(service_module, "time", clock)
        self.plugin = Plugin()
        self.plugin.lists = Cell(b"")
        self.service = DevicePluginService(self.plugin, read=lambda: self.record)  # type: ignore[arg-type]

    async def hand_out(self) -> None:
        await self.service._allocate(Stream(lambda: None))  # type: ignore[arg-type]

    def read(self, began: float, written: float, *holdings: Holding) -> frozenset[str]:
        """IDs that still count after a reading."""
        self.clock = began + 0.1
        self.record = Record(holdings, began=began, written=written)
        return self.service.granted_lately()


@pytest.fixture
async def granted(monkeypatch: pytest.MonkeyPatch) -> Granted:
    found = Granted(monkeypatch)
    await found.hand_out()
    return found


async def test_what_a_plain_init_container_got_counts_until_the_checkpoint_is_written(
    granted: Granted,
) -> None:
    """PodResources never list it, and the kubelet writes it down once the container has all its devices."""
    assert granted.read(103.0, written=90.0) == set(IDS)
    assert granted.read(110.0, written=101.9) == set(IDS)  # that may have been on its way before
    assert granted.read(110.5, written=102.1) == frozenset()


async def test_a_pod_that_was_refused_between_its_devices_leaves_nothing_in_any_file(
    granted: Granted,
) -> None:
    assert granted.read(100.0 + UNWRITTEN_SECONDS, written=90.0) == set(IDS)
    assert granted.read(100.1 + UNWRITTEN_SECONDS, written=90.0) == frozenset()


async def test_what_a_later_reading_shows_needs_no_grant(granted: Granted) -> None:
    shown = Holding("ns", "p", "c", "r", ("a",))
    assert granted.read(99.9, 90.0, shown) == set(IDS)
    assert granted.read(100.2, 90.0, replace(shown, source=Source.FORGOTTEN)) == set(IDS)
    assert granted.read(100.3, 90.0, replace(shown, resource="other")) == set(IDS)
    # An init container's go on to a later one.
    assert granted.read(100.4, 90.0, shown, replace(shown, container="d")) == {"b"}
    assert granted.read(100.5, 90.0) == {"b"}


async def test_the_kubelet_is_had_to_write_who_has_got_what(granted: Granted) -> None:
    """It does so with each list. Without it the next mode would wait for 20 s."""
    version = granted.plugin.lists.version
    for began, sent in ((101.9, 0), (102.1, 1), (102.6, 1), (103.1, 1), (104.4, 2)):
        assert granted.read(began, written=90.0) == set(IDS)
        assert granted.plugin.lists.version == version + sent
    assert granted.read(104.9, written=104.4) == frozenset()
    assert granted.read(120.0, written=104.4) == frozenset()
    assert granted.plugin.lists.version == version + 2


async def test_without_a_checkpoint_a_later_reading_is_enough(granted: Granted) -> None:
    assert granted.read(101.9, written=101.9) == set(IDS)
    assert granted.read(102.1, written=102.1) == frozenset()
    assert granted.plugin.lists.version == 0


async def test_who_had_it_before_says_nothing_of_a_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint names one that has ended until it is written again, which a slow disk puts off."""
    ended = Holding("ns", "ended", "c", "r", tuple(IDS), source=Source.CHECKPOINT)
    granted = Granted(monkeypatch, Record((ended,), began=99.0, written=90.0))
    await granted.hand_out()
    assert granted.read(100.5, 90.0, ended) == set(IDS)
    assert granted.read(101.0, 90.0) == set(IDS)
    assert granted.read(101.5, 90.0, replace(ended, pod="next")) == frozenset()
