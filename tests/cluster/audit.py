"""The API server's audit log: which rights an account has used, and what it was refused."""

import json
from pathlib import Path
from typing import Any

from tests.cluster.waiting import NotYet, eventually

Right = tuple[str, str]  # resource, verb


class AuditLog:
    """Requests of the agent's account since this was made."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "audit.log"
        self._before = len(self._file.read_text().splitlines()) if self._file.exists() else 0

    def _entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._file.read_text().splitlines()[self._before :]]

    def refused(self) -> list[dict[str, Any]]:
        """Requests that RBAC or a policy refused."""
        return [
            entry
            for entry in self._entries()
            if entry["responseStatus"]["code"] == 403
            # The server says so, too, where it has no streaming lists.
            or (entry["responseStatus"]["code"] == 422 and entry["verb"] != "watch")
        ]

    def used(self) -> set[Right]:
        """Rights that were made use of."""
        found = set()
        for entry in self._entries():
            reference, part = entry["objectRef"], entry["objectRef"].get("subresource")
            if entry["annotations"].get("authorization.k8s.io/decision") == "allow":
                resource = f"{reference['resource']}/{part}" if part else reference["resource"]
                found.add((resource, entry["verb"]))
        return found

    def wait(self, *rights: Right) -> None:
        """Wait until they have been used."""

        def seen() -> None:
            if missing := {*rights} - self.used():
                raise NotYet(f"not used: {missing}")

        eventually(seen, timeout=30, what="the audit log shows the right in use", interval=0.2)
