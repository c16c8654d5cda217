"""The extender's certificate for kube-scheduler: read at the start, and again when it was renewed."""

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import structlog

from agent.extender.settings import Tls
from agent.kit.supervise import FatalError

log = structlog.get_logger()

LOOK_SECONDS = 5.0  # the kubelet takes a minute or so to show a changed Secret anyway

REMEMBERED_NAMES = 100  # of refused callers: a holder of the signing key could make up any number

_Stamp = tuple[tuple[int, int, int], ...]


class Certificates:
    """The files that `Tls` names, and the context that connections are made with."""

    def __init__(self, tls: Tls) -> None:
        """Blocks. Raises FatalError when the files cannot be used."""
        self._tls = tls
        self._seen = _stamp(tls)
        try:
            self.context = self._read()
        except (OSError, ssl.SSLError) as error:
            raise FatalError(
                f"tls: {self._named} cannot be used: {error}; mount a certificate, or set tls.port: null"
            ) from error

    @property
    def _named(self) -> str:
        return f"{self._tls.certificate}, {self._tls.key} and {self._tls.client_authority}"

    async def follow(self) -> None:
        """Give new connections what the files hold by now, for ever. An authority once trusted stays so."""
        while True:
            await anyio.sleep(LOOK_SECONDS)
            await anyio.to_thread.run_sync(self._look)

    def _look(self) -> None:
        stamp = _stamp(self._tls)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._read()  # tried apart: files of two renewals would spoil the context that serves
            _load(self.context, self._tls)
        except (OSError, ssl.SSLError) as error:
            log.warning("certificate_not_renewed", files=self._named, problem=str(error))
        else:
            log.info("certificate_renewed", files=self._named)

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self._tls.client_authority)
        context.verify_mode = ssl.CERT_REQUIRED
        _load(context, self._tls)
        return context


class AllowedNames:
    """Common names of the clients that are served; the API server takes them for the user's name, too.

    The authority alone is not enough: kubeadm's has signed a certificate of every kubelet, too.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._logged: set[str] = set()

    def refusal(self, certificate: Mapping[str, Any]) -> str | None:
        """Why the caller with this certificate (as `ssl.SSLSocket.getpeercert` gives it) is not served."""
        names = [
            value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"
        ]
        if len(names) == 1 and names[0] in self._names:
            return None
        shown = ", ".join(map(repr, names)) or "no common name"
        if shown not in self._logged and len(self._logged) < REMEMBERED_NAMES:
            self._logged.add(shown)
            log.warning("client_certificate_refused", name=shown, allowed=sorted(self._names))
        return f"a certificate of {shown} is not served; tls.clientNames has {', '.join(sorted(self._names))}"


def _load(context: ssl.SSLContext, tls: Tls) -> None:
    context.load_verify_locations(cafile=tls.client_authority)
    context.load_cert_chain(tls.certificate, tls.key)


def _stamp(tls: Tls) -> _Stamp:
    """Changes with the files; empty while one is missing."""
    try:
        found = [Path(name).stat() for name in (tls.certificate, tls.key, tls.client_authority)]
    except OSError:
        return ()
    return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)
