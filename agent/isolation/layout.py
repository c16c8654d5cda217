"""The two files that the agent and the enforcement library share, byte by byte; `clib/layout.h` is the other side.

Both layouts only grow: what has a place keeps it, so that libraries of before go on with files of now. The
*limit file* is the agent's alone and read-only in the container. It holds two copies of each GPU's limits with
a checksum and an index of the one in force: the agent writes the other copy, then the index, each by one
pwrite(2), so that a reader finds a whole copy whenever the agent dies. The *usage region* is the container's
own, and so a hint at most.
"""

import struct
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from agent.isolation.errors import BadLayout

LAYOUT = 1
MOST_DEVICES = 16
LIMIT_MAGIC = 0x314D494C414E47  # "GNALIM1" in memory
LIMIT_BYTES = 8192
LIMIT_HEADER_BYTES = 512
DEVICE_BYTES = 256
USAGE_MAGIC = 0x314753554E4147
USAGE_BYTES = 1 << 20
USAGE_SLOTS = 2048
