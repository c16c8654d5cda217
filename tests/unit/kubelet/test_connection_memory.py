"""Calls that are over are kept by a connection for a while, and no longer."""

import tracemalloc

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived

import agent.kubelet.wire  # noqa: F401  it sets the bound

CALL = [(":method", "POST"), (":scheme", "http"), (":path", "/call"), (":authority", "x")]
CALLS = 4000  # many more than are remembered


def test_memory_of_a_connection_is_bounded() -> None:
    client, server = _connected()
    _calls(client, server, CALLS // 2)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        _calls(client, server, CALLS)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < CALLS * 100  # each call left 200 bytes on either side


def test_a_late_frame_of_a_call_does_not_end_the_connection() -> None:
    client, server = _connected()
    early = _calls(client, server, 1)
    late = _calls(client, server, 1000)
    assert late == early + 2000
    for stream in (early, late):
        window_update = b"\x00\x00\x04\x08\x00" + stream.to_bytes(4, "big") + (1).to_bytes(4, "big")
        assert server.receive_data(window_update) == []
    assert _calls(client, server, 1) > late


def _connected() -> tuple[H2Connection, H2Connection]:
    client = H2Connection(H2Configuration(client_side=True))
    server = H2Connection(H2Configuration(client_side=False))
    client.initiate_connection()
    server.initiate_connection()
    server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())
    return client, server


def _calls(client: H2Connection, server: H2Connection, count: int) -> int:
    """The stream of the last of `count` calls, each of which ends on both sides."""
    for _ in range(count):
        stream = client.get_next_available_stream_id()
        client.send_headers(stream, CALL, end_stream=True)
        [asked] = [
            each for each in server.receive_data(client.data_to_send()) if isinstance(each, RequestReceived)
        ]
        server.send_headers(asked.stream_id, [(":status", "200")], end_stream=True)
        client.receive_data(server.data_to_send())
    return stream
