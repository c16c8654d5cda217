"""A server's certificate: read at the start, and again when it was renewed."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import structlog

from agent.kit.tasks import FatalError

log = structlog.get_logger()

LOOK_SECONDS = 5.0  # the kubelet takes a minute or so to show a changed Secret anyway

_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Files:
    """Paths; with an authority callers must show a certificate of it."""

    certificate: str
    key: str
    client_authority: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(name for name in (self.certificate, self.key, self.client_authority) if name)


class Certificates:
    """The files, and the context that connections are made with."""

    def __init__(self, files: Files, remedy: str) -> None:
        """Blocks. Raises FatalError, with the remedy, when the files cannot be used."""
        self._files = files
        self._seen = _stamp(files)
        try:
            self.context = self._read()
        except (OSError, ssl.SSLError) as error:
            raise FatalError(f"tls: {self._named} cannot be used: {error}; {remedy}") from error

    @property
    def _named(self) -> str:
        *first, last = self._files.all
        return f"{', '.join(first)} and {last}"

    async def follow(self) -> None:
        """Give new connections what the files hold by now, for ever. An authority once trusted stays so."""
        while True:
            await anyio.sleep(LOOK_SECONDS)
            await anyio.to_thread.run_sync(self._look)

    def _look(self) -> None:
        stamp = _stamp(self._files)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._read()  # tried apart: files of two renewals would spoil the context that serves
            _load(self.context, self._files)
        except (OSError, ssl.SSLError) as error:
            log.warning("certificate_not_renewed", files=self._named, problem=str(error))
        else:
            log.info("certificate_renewed", files=self._named)

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        _load(context, self._files)
        if self._files.client_authority:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _load(context: ssl.SSLContext, files: Files) -> None:
    if files.client_authority:
        context.load_verify_locations(cafile=files.client_authority)
    context.load_cert_chain(files.certificate, files.key)


def _stamp(files: Files) -> _Stamp:
    """Changes with the files; empty while one is missing."""
    try:
        found = [Path(name).stat() for name in files.all]
    except OSError:
        return ()
    return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)
