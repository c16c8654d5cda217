"""Ports of this machine that programs of others are given, since they cannot take one by themselves."""

import random
import socket
from pathlib import Path
from typing import Final

EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST: Final = 10_000


def free_port() -> int:
    """One that nobody listens on, and that no connection is given by chance until somebody does."""
    below = int(EPHEMERAL.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(LOWEST, below)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
