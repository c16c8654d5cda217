"""Programs of another processor on this machine: qemu-user, registered with the kernel while needed."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.build import debian
from tests.cluster.build.cache import Report
from tests.cluster.build.commands import run
from tests.cluster.build.errors import BuildError

ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's name, which is also that of OCI images -> the kernel's name."""
_REGISTRY = Path("/proc/sys/fs/binfmt_misc")
_RULES = Path("/usr/lib/binfmt.d")


def own_architecture() -> str:
    """Debian's name for this machine's processor. Raises BuildError for one without images."""
    for name, machine in ARCHITECTURES.items():
        if machine == platform.machine():
            return name
    raise BuildError(f"no image is built on {platform.machine()}: use one of {', '.join(ARCHITECTURES)}")


@contextmanager
def emulated(architecture: str, report: Report) -> Iterator[None]:
    """Let programs of `architecture` be started; nothing where the machine runs them by itself.

    Raises BuildError where the kernel has no binfmt_misc or does not let this process use it.
    """
    if architecture == own_architecture():
        yield
        return
    machine = ARCHITECTURES[architecture]
    name = f"gna-{machine}-{os.getpid()}"
    debian.ensure({f"/usr/bin/qemu-{machine}-static": "qemu-user-static"}, report)
    if not (_REGISTRY / "register").exists():
        run("mounting binfmt_misc", ["mount", "-t", "binfmt_misc", "binfmt_misc", str(_REGISTRY)], timeout=10)
    _, _, rest = (_RULES / f"qemu-{machine}.conf").read_text().strip().removeprefix(":").partition(":")
    try:
        (_REGISTRY / "register").write_text(f":{name}:{rest}")
    except OSError as error:
        raise BuildError(
            f"{architecture} programs cannot be started here: the kernel refuses a rule of binfmt_misc "
            f"({error.strerror}); build this image on a machine of that architecture"
        ) from error
    try:
        yield
    finally:
        (_REGISTRY / name).write_text("-1")
