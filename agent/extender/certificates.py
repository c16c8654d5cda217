"""Clients of the extender, by the names in their certificates."""

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

log = structlog.get_logger()

REMEMBERED_NAMES = 100  # of refused callers: a holder of the signing key could make up any number


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
