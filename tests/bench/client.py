"""A kubelet's side of a resource's socket, on the C core of gRPC: what the agent's own library is not."""

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from tests.component.protos import load

CALL_SECONDS = 5.0
SWITCH_SECONDS = 0.0005


class KubeletClient:
    """Calls on one socket; all block."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._api = load("deviceplugin")
        self._watcher = load("registration")
        self._plugin = self._api.DevicePluginStub(channel)
        self._registration = self._watcher.RegistrationStub(channel)

    def info(self) -> str:
        """GetInfo: the resource's name."""
        answer = self._registration.GetInfo(self._watcher.InfoRequest(), timeout=CALL_SECONDS)
        return str(answer.name)

    def allocate(self, ids: Sequence[str]) -> Any:
        """Allocate for one container."""
        request = self._api.AllocateRequest()
        request.container_requests.add().devices_ids.extend(ids)
        return self._plugin.Allocate(request, timeout=CALL_SECONDS)

    def prefer(self, available: Sequence[str], size: int) -> list[str]:
        """GetPreferredAllocation for one container, nothing to be included."""
        request = self._api.PreferredAllocationRequest()
        one = request.container_requests.add(allocation_size=size)
        one.available_device_ids.extend(available)
        answer = self._plugin.GetPreferredAllocation(request, timeout=CALL_SECONDS)
        return list(answer.container_responses[0].device_ids)

    def first_list(self) -> Any:
        """Open ListAndWatch, take its first list, and hang up."""
        stream = self._plugin.ListAndWatch(self._api.Empty(), timeout=CALL_SECONDS)
        try:
            return next(stream)
        finally:
            stream.cancel()

    def lists(self, deadline: float) -> Iterator[dict[str, bool]]:
        """Every list of a ListAndWatch stream as ID -> healthy, for at most `deadline` seconds."""
        stream = self._plugin.ListAndWatch(self._api.Empty(), timeout=deadline)
        try:
            for message in stream:
                yield {device.ID: device.health == "Healthy" for device in message.devices}
        finally:
            stream.cancel()


@contextmanager
def kubelet_client(socket: Path) -> Iterator[KubeletClient]:
    """A client with a connection of its own."""
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        yield KubeletClient(channel)


def wait_for_info(socket: Path, deadline: float) -> str:
    """The resource's name, asked as soon as the socket is there; looks every 0.5 ms."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if socket.is_socket():
            try:
                with kubelet_client(socket) as client:
                    return client.info()
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
        time.sleep(0.0005)
    raise TimeoutError(f"{socket} does not answer GetInfo within {deadline:g} s")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, what this process does beside the calls that it times hardly holds them up.

    It is the kubelet and the API server, too. Looking for garbage among all that the bench has loaded takes
    45 ms; and a thread that computes gives the interpreter to one whose call was answered after 5.
    """
    before = sys.getswitchinterval()
    gc.collect()
    gc.disable()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.enable()


def timed(call: Any, count: int, warm_up: int) -> list[float]:
    """Milliseconds of `count` calls, one after the other, after some that are not counted."""
    for _ in range(warm_up):
        call()
    taken = []
    for _ in range(count):
        started = time.perf_counter()
        call()
        taken.append((time.perf_counter() - started) * 1000)
    return taken
