"""NVIDIA's own generator of CDI specifications, `nvidia-ctk` of the container toolkit, and its hook.

Which libraries, nodes and hooks a driver needs changes with every release of it: that is NVIDIA's to know.
"""

import filecmp
import json
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread

from agent.injection.companions import Companion, device_root, nodes
from agent.kit import files, programs

# The CDI specification of the node's GPUs as a value: its checks, and devices that a newer one keeps.
#
# Format: CDI specification 0.5 and newer (`kind`, `devices[].name`, `containerEdits`), as written by
# `nvidia-ctk cdi generate`. Its edits are NVIDIA's and pass through unread.

VENDOR, CLASS = "gpu-node-agent.io", "gpu"
# Never nvidia.com/gpu: a device name that stands in two files of one folder is lost in both.
KIND = f"{VENDOR}/{CLASS}"
FILE = "gpu-node-agent-gpus.json"
LIMITS_HOOK = "apply-cuda-memory-limits"  # of nvidia-cdi-hook, from 1.20.1


class CdiError(Exception):
    """The specification cannot be made, or is not usable; the message names the remedy."""


class BadSpecification(CdiError):
    """A specification that container runtimes would refuse, or that is not ours."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Which GPUs containers can get by the file, by UUID, and why it is not as it should be."""

    names: frozenset[str] = frozenset()
    problem: str | None = None
    # Those with NVIDIA's hook for the driver's memory limits (`agent.vgpu.limits`).
    limiting: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Specification:
    content: Mapping[str, Any]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(device["name"] for device in self.content["devices"])

    @property
    def limiting(self) -> frozenset[str]:
        """Names of the devices that carry NVIDIA's hook for the driver's memory limits."""
        return frozenset(device["name"] for device in self.content["devices"] if _limits_memory(device))

    def encoded(self) -> bytes:
        return json.dumps(self.content, separators=(",", ":")).encode()

    def keeping(self, before: "Specification | None", named: AbstractSet[str] | None) -> "Specification":
        """With the devices of `before` that this one lacks and containers still name; None: not known which.

        The kubelet repeats the names of a container that it restarts, and the runtime starts none with a
        name that it cannot resolve, be the GPU back by then or not.
        """
        if before is None:
            return self
        own = self.names
        kept = [
            device
            for device in before.content["devices"]
            if device["name"] not in own and (named is None or device["name"] in named)
        ]
        return Specification({**self.content, "devices": [*self.content["devices"], *kept]}) if kept else self

    def beside(self, other: "Specification", names: Sequence[str]) -> "Specification":
        """With the edits of `other`'s devices of these names for each container with a device of this one."""
        edits = dict(self.content.get("containerEdits", {}))
        found = [each["containerEdits"] for each in other.content["devices"] if each["name"] in names]
        for each in (other.content.get("containerEdits", {}), *found):
            for key, values in each.items():
                before = edits.get(key, [])
                edits[key] = [*before, *(value for value in values if value not in before)]
        return Specification({**self.content, "containerEdits": edits})


def _limits_memory(device: Mapping[str, Any]) -> bool:
    hooks = device["containerEdits"].get("hooks")
    return isinstance(hooks, list) and any(
        isinstance(hook, dict) and isinstance(hook.get("args"), list) and LIMITS_HOOK in hook["args"]
        for hook in hooks
    )


def parse(text: bytes) -> Specification:
    """A specification of the GPUs. Raises BadSpecification."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSpecification(f"the specification is no JSON: {str(error)[:200]}") from error
    if not isinstance(content, dict) or not isinstance(content.get("cdiVersion"), str):
        raise BadSpecification("the specification has no cdiVersion")
    if content.get("kind") != KIND:
        raise BadSpecification(f"the specification is of kind {str(content.get('kind'))[:80]}, not {KIND}")
    devices = content.get("devices")
    if not isinstance(devices, list) or not devices:
        raise BadSpecification("the specification names no device")
    for device in devices:
        if (
            not isinstance(device, dict)
            or not isinstance(device.get("name"), str)
            or not isinstance(device.get("containerEdits"), dict)
        ):
            raise BadSpecification("the specification has a device without a name or edits")
    return Specification(content)


# NVIDIA's two programs in the image, and the hook on the host: runtimes call it by its path there.
#
# Below the state folder and never below /run, which many nodes mount noexec. The image brings the program;
# the copy stays when the agent goes, for containers that are started again.

CTK = "nvidia-ctk"
HOOK = "nvidia-cdi-hook"
FOLDER = "bin"  # of the hook on the host, below host.state


class HookNotInstalled(CdiError):
    """The hook cannot be put on the host, or not be run there."""


def present(folder: Path) -> bool:
    """Whether both programs lie in a folder. Blocks."""
    return all(os.access(folder / name, os.X_OK) for name in (CTK, HOOK))


def install(source: Path, folder: Path) -> Path:
    """Copy the program to `folder` unless it is there already; its path. Blocks. Raises HookNotInstalled."""
    target = folder / HOOK
    try:
        if not _same(source, target):
            # Hooks of containers that start meanwhile run on with the file that they have opened.
            files.write(folder, HOOK, source.read_bytes(), mode=0o755)
        refused = _noexec(folder)
    except OSError as error:
        raise HookNotInstalled(
            f"{target} cannot be written: {error.strerror or error}; make host.state writable for the agent"
        ) from error
    if refused:
        raise HookNotInstalled(_REFUSED.format(folder))
    return target


def obstacle(folder: Path) -> str | None:
    """Why no runtime could run the program there, be it there yet or not; None: nothing is seen. Blocks."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        return _REFUSED.format(folder) if _noexec(there) else None
    except OSError as error:
        return f"{there} cannot be looked at: {error.strerror}"


_REFUSED = (
    f"{{}} is on a file system mounted noexec, so that no runtime can run {HOOK} there; "
    "name another folder in host.state"
)


def _noexec(folder: Path) -> bool:
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def _same(source: Path, target: Path) -> bool:
    return (
        target.is_file()
        and not target.is_symlink()
        and os.access(target, os.X_OK)
        and filecmp.cmp(source, target, shallow=False)
    )


# NVIDIA's own generator of CDI specifications, `nvidia-ctk` of the container toolkit, behind a port.

SECONDS = 30.0  # NVML without persistence mode wakes one GPU after the other
MOST_BYTES = 4 << 20  # 16 GPUs take 30 KiB


class GenerationFailed(CdiError):
    """NVIDIA's program gave no specification."""


class Generator(Protocol):
    """Makes specifications of the GPUs that the machine has now."""

    async def generate(self) -> Specification:
        """Raises CdiError."""

    async def beside(self) -> Sequence[str]:
        """Further inputs of it; once they differ it is out of date."""


@dataclass(frozen=True, slots=True)
class Places:
    """Folders, as the agent sees them unless said otherwise."""

    programs: Path  # of nvidia-ctk and nvidia-cdi-hook
    driver_root: Path
    host_driver_root: Path  # the same folder, as the host sees it
    hook: Path  # where the hook is put, on the host and for the agent alike
    companions: tuple[Companion, ...] = ()


class Toolkit:
    """The generator of the real node."""

    def __init__(self, places: Places) -> None:
        self._places = places

    async def generate(self) -> Specification:
        """See Generator. Puts the hook on the host first: the specification names it."""
        hook = await anyio.to_thread.run_sync(install, self._places.programs / HOOK, self._places.hook)
        return await self.specification(hook)

    async def specification(self, hook: Path) -> Specification:
        """The same with a hook that is or will be there; nothing is written. Raises CdiError."""
        places = self._places
        dev_root = await anyio.to_thread.run_sync(device_root, places.driver_root)
        made = await self._generated(
            "nvml",
            places.driver_root,
            hook,
            "--device-name-strategy=uuid",
            "--no-all-device",
            f"--dev-root={dev_root}",
        )
        for each in places.companions:
            # Of what the node lacks there is nothing to make; no GPU is offered then.
            if await anyio.to_thread.run_sync(nodes, dev_root, (each,)):
                theirs = await self._generated(each.mode, dev_root, hook, f"--dev-root={dev_root}")
                made = made.beside(theirs, each.devices)
        return made

    async def beside(self) -> Sequence[str]:
        """The nodes of companions that are there now, with their numbers, which the file has, too."""
        return await anyio.to_thread.run_sync(self._beside)

    def _beside(self) -> Sequence[str]:
        root = device_root(self._places.driver_root)
        found = []
        for name in nodes(root, self._places.companions):
            with suppress(FileNotFoundError):  # its module was unloaded meanwhile
                found.append(f"{name} {(root / name).stat().st_rdev}")
        return tuple(found)

    async def _generated(self, mode: str, root: Path, hook: Path, *more: str) -> Specification:
        text = await self._run(
            "cdi",
            "generate",
            f"--mode={mode}",
            "--format=json",
            f"--vendor={VENDOR}",
            f"--class={CLASS}",
            f"--driver-root={root}",
            f"--nvidia-cdi-hook-path={hook}",
            *more,
        )
        places = self._places
        host = places.host_driver_root if root == places.driver_root else root
        return parse(text if root == host else await self._transformed(text, root, host))

    async def _transformed(self, text: bytes, root: Path, host: Path) -> bytes:
        """With the host's paths in place of ours."""
        # Its output is YAML, whatever its input; a file has the format of its name.
        async with anyio.TemporaryDirectory(prefix="gpu-node-agent-") as scratch:
            file = Path(scratch) / "transformed.json"
            await self._run(
                "cdi",
                "transform",
                "root",
                f"--from={root}",
                f"--to={host}",
                "--relative-to=host",
                f"--output={file}",
                stdin=text,
            )
            try:
                return (await anyio.to_thread.run_sync(files.read_text, file, MOST_BYTES)).encode()
            except (OSError, UnicodeDecodeError) as error:
                raise GenerationFailed(f"{CTK} cdi transform root wrote no {file.name}: {error}") from error

    async def _run(self, *arguments: str, stdin: bytes = b"") -> bytes:
        command = [str(self._places.programs / CTK), "--quiet", *arguments]
        call = f"{CTK} {' '.join(word for word in arguments if not word.startswith('-'))}"
        try:
            done = await programs.run(
                command, environment=_environment(), seconds=SECONDS, most_bytes=MOST_BYTES, stdin=stdin
            )
        except TimeoutError as error:
            raise GenerationFailed(
                f"{call} did not end within {SECONDS:g} s; look for GPUs that do not answer (nvidia-smi)"
            ) from error
        except programs.OutputTooLong as error:
            raise GenerationFailed(f"{call} wrote more than {MOST_BYTES} bytes") from error
        except OSError as error:
            raise GenerationFailed(f"{command[0]} cannot be run: {error.strerror}") from error
        if done.code:
            said = " ".join(done.errors.split())[-400:]
            raise GenerationFailed(
                f"{call} failed with {done.code}: {said}; the driver's files are looked for below "
                f"{self._places.driver_root} (injection.driverRoot)"
            )
        return done.output


def _environment() -> Mapping[str, str]:
    """Without the variables that stand for options of the program."""
    return {name: value for name, value in os.environ.items() if not name.startswith("NVIDIA_")}
