"""Pods for tests, as manifests."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.cluster.build.parts import BUSYBOX_IMAGE

FOREVER = ("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done")
"""Ends at once on SIGTERM; a plain `sleep` as process 1 would sit out the whole grace period."""


def container(
    name: str,
    command: Sequence[str] = FOREVER,
    *,
    limits: Mapping[str, int | str] | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A container of the busybox image."""
    return {
        "name": name,
        "image": BUSYBOX_IMAGE,
        "imagePullPolicy": "Never",
        "command": list(command),
        "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
        "resources": {"limits": {key: str(value) for key, value in (limits or {}).items()}},
    }


def pod(
    name: str,
    *containers: Mapping[str, Any],
    init: Sequence[Mapping[str, Any]] = (),
    restart_policy: str = "Never",
    **spec: Any,
) -> dict[str, Any]:
    """A pod; without containers it gets one named `main` that runs until SIGTERM."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "containers": list(containers) or [container("main")],
            "initContainers": list(init),
            "restartPolicy": restart_policy,
            "automountServiceAccountToken": False,
            **spec,
        },
    }
