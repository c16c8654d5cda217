"""Grants count until a reading could have shown them, by what the plugin's service answers."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from grpclib.exceptions import GRPCError

from agent.kit.tasks import Cell
from agent.kubelet import service as service_module
from agent.kubelet.service import GRANT_SECONDS, DevicePluginService
from agent.kubelet.wire import Allocation, PreferenceRequest, Refused

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
    service = DevicePluginService(Plugin(), read=lambda: read[0])  # type: ignore[arg-type]
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
