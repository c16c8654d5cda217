"""Stand-ins that cost less say the same as those in whose place they are."""

import socket
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.storm.cheaper import _sockets_if_changed
from tests.storm.storm import SCRATCH


def test_a_socket_that_comes_within_a_tick_of_the_kernel_is_seen() -> None:
    """One that replaces another changes the folder twice, and may leave it with one time."""
    with TemporaryDirectory(dir=SCRATCH) as made_here:
        folder = Path(made_here)
        hidden, place = folder / ".p.sock", folder / "p.sock"
        for _ in range(50):
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(hidden))
                list(_sockets_if_changed(folder))
                hidden.rename(place)
            status = place.stat()
            assert list(_sockets_if_changed(folder)) == [(place, (status.st_ino, status.st_mtime_ns))]
