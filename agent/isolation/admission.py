"""What a container that is being admitted asks for, and what it is given."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Request:
    """A container that is being admitted, and what it may use of its GPU."""

    uid: str  # of the pod
    namespace: str
    pod: str
    container: str
    gpu: str  # UUID
    ids: tuple[str, ...]  # its units of memory
    memory_bytes: int
    cores: int  # percent; 0: no claim
    driver: bool = False  # whether the driver can hold it to its memory
    avoidable: tuple[str, ...] = ()  # how its pod could get around its limits, each in words


@dataclass(frozen=True, slots=True)
class Bind:
    """A file of the host that a container gets."""

    container_path: str
    host_path: Path
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class Admission:
    """What keeps a container that starts now to its memory; nothing does where both are empty."""

    binds: tuple[Bind, ...] = ()
    driver: bool = False  # whether the driver is to be given the limit
