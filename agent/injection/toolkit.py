"""NVIDIA's own generator of CDI specifications, `nvidia-ctk` of the container toolkit, behind a port.

Which libraries, nodes and hooks a driver needs changes with every release of it: that is NVIDIA's to know.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from agent.injection.companions import Companion, device_root, nodes
from agent.injection.hook import CTK, HOOK, install
from agent.injection.specification import CLASS, VENDOR, CdiError, Specification, parse
from agent.kit import files, programs

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
