"""A stand-in for NVIDIA's device plugin: what it registers, and the objects by which it is installed.

NVIDIA/k8s-device-plugin: socket `nvidia-gpu.sock` in the kubelet's device-plugins folder, Register on
kubelet.sock, the UUIDs of whole GPUs as device IDs, no word to the Node object. Names of objects and labels
are those of its static manifest, `deployments/static/nvidia-device-plugin.yml`.
"""

import signal
import sys
import threading
from pathlib import Path
from typing import Any

from tests.cluster import manifests
from tests.cluster.agent_process import REPOSITORY
from tests.cluster.api import Manifest
from tests.component.kubelet.peer import GPU, Call, Plugin, register

NAMESPACE, NAME, LABEL = "kube-system", "nvidia-device-plugin-daemonset", "nvidia-device-plugin-ds"
SOCKET = "nvidia-gpu.sock"


def daemon_set(kubelet: Path, uuids: tuple[str, ...], **pod: Any) -> Manifest:
    """The DaemonSet; its pods run this very file with the machine's Python. `pod`: more of their spec.

    `kubelet` is the kubelet's root folder.
    """
    program = f"exec {sys.executable} -m {__name__} {kubelet / 'device-plugins'} {' '.join(uuids)}"
    container = manifests.container(
        "nvidia-device-plugin-ctr", ["chroot", "/host", "/bin/sh", "-c", f"cd {REPOSITORY} && {program}"]
    )
    container["securityContext"] = {"privileged": True}
    container["volumeMounts"] = [{"name": "host", "mountPath": "/host"}]
    spec = {
        **manifests.pod(NAME, container, restart_policy="Always")["spec"],
        "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "system-node-critical",
        "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
        **pod,
    }
    labels = {"name": LABEL}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def serve(folder: Path, uuids: tuple[str, ...]) -> None:
    """Serve the GPUs until SIGTERM."""
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())

    def preferred(call: Call) -> list[str]:
        rest = [one for one in sorted(call.ids) if one not in call.must_include]
        return [*call.must_include, *rest][: call.size]

    plugin = Plugin(
        folder / SOCKET,
        devices=dict.fromkeys(uuids, True),
        preferred=preferred,
        answer=lambda call: {"envs": {"NVIDIA_VISIBLE_DEVICES": ",".join(sorted(call.ids))}},
    )
    plugin.socket.unlink(missing_ok=True)
    with plugin.serving():
        register(folder / "kubelet.sock", SOCKET)
        end.wait()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), tuple(sys.argv[2:]))
