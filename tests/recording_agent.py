"""`python -m tests.recording_agent run ...`: the agent as tests run it.

On a slow machine it has as much longer before it ends the hard way, and the API server, which the test's own
process plays, before a pod is refused since it does not answer. If RECORD_LISTS names a file, it writes
down every list that it sends. Each record says which resource, and whether a stream opened, a message is
about to be sent, has been sent, or the stream ended; `tests/scenarios/lists.py` reads it.
"""

import os
import struct
import sys
from typing import Any

from agent.cli import main as cli
from agent.cli import serve
from agent.cluster import pods
from agent.kubelet import service
from agent.pairing import resolver
from tests.pace import scaled

VARIABLE = "RECORD_LISTS"
LONGEST_MISS_SECONDS = 4.0
HEADER = struct.Struct("<cHI")  # what happened, length of the resource's name, length of the message
START, OPENED, SENDING, SENT, ENDED = b"A", b"O", b"S", b"D", b"E"


class Recorder:
    """Appends records, each in one write: a killed agent leaves no half of one."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: bytes, resource: str = "", message: bytes = b"") -> None:
        """One record."""
        name = resource.encode()
        os.write(self._file, HEADER.pack(what, len(name), len(message)) + name + message)


class _RecordedStream:
    def __init__(self, stream: Any, recorder: Recorder, resource: str) -> None:
        self._stream, self._recorder, self._resource = stream, recorder, resource

    async def recv_message(self) -> Any:
        return await self._stream.recv_message()

    async def send_message(self, message: bytes) -> None:
        self._recorder.write(SENDING, self._resource, message)
        await self._stream.send_message(message)
        self._recorder.write(SENT, self._resource)


def record(recorder: Recorder) -> None:
    """Have every resource's ListAndWatch recorded."""
    original = service.DevicePluginService._list_and_watch

    async def list_and_watch(self: service.DevicePluginService, stream: Any) -> None:
        resource = self.plugin.resource
        recorder.write(OPENED, resource)
        try:
            await original(self, _RecordedStream(stream, recorder, resource))  # type: ignore[arg-type]
        finally:
            recorder.write(ENDED, resource)

    service.DevicePluginService._list_and_watch = list_and_watch  # type: ignore[method-assign]


def main() -> int:
    """Run the agent."""
    if path := os.environ.get(VARIABLE):
        recorder = Recorder(path)
        recorder.write(START)
        record(recorder)
    serve.STOP_SECONDS, serve.TEARDOWN_SECONDS = scaled(serve.STOP_SECONDS), scaled(serve.TEARDOWN_SECONDS)
    # Within the time of an Allocate.
    for room, name in ((pods, "MISS_SECONDS"), (resolver, "MISS_SECONDS"), (pods, "FIRST_COPY_SECONDS")):
        setattr(room, name, min(scaled(getattr(room, name)), LONGEST_MISS_SECONDS))
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
