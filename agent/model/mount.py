"""A file or folder of the host in a container, whichever door the container comes through. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mount:
    container_path: str
    host_path: str
    read_only: bool = True
