"""etcd, API server, controller manager and scheduler: what they are started with."""

import json
import signal
from dataclasses import dataclass

from tests.cluster.build import Parts
from tests.cluster.layout import Layout
from tests.cluster.namespace import Namespace, Program
from tests.cluster.options import Options
from tests.cluster.pki import Authority

SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback ports of the control plane."""

    api: int
    etcd_client: int
    etcd_peer: int

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.api}"


def make_certificates(authority: Authority, server: str) -> None:
    """Certificates of the control plane and of the tests' own administrator."""
    names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
    alternatives = ",".join([f"DNS:{name}" for name in names] + ["IP:127.0.0.1", f"IP:{SERVICE_ADDRESS}"])
    authority.sign("apiserver", "/CN=kube-apiserver", usage="serverAuth", alternatives=alternatives)
    for name, subject in (
        ("admin", "/O=system:masters/CN=admin"),
        ("kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
        ("controllers", "/CN=system:kube-controller-manager"),
        ("scheduler", "/CN=system:kube-scheduler"),
    ):
        authority.sign(name, subject, usage="clientAuth")
    for name in ("admin", "controllers", "scheduler"):
        authority.kubeconfig(name, server)


def programs(
    parts: Parts, namespace: Namespace, layout: Layout, ports: Ports, options: Options, env: dict[str, str]
) -> dict[str, Program]:
    """The four programs by name, not started."""
    pki = layout.certificates

    def program(
        name: str, binary: str, flags: dict[str, str], *more: str, stop: signal.Signals = signal.SIGTERM
    ) -> Program:
        argv = [str(parts.program(binary)), *(f"--{key}={value}" for key, value in flags.items()), *more]
        log = layout.logs / f"{name}.log"
        return Program(name, argv, namespace=namespace, log=log, env=env, stop_signal=stop)

    client, peer = f"http://127.0.0.1:{ports.etcd_client}", f"http://127.0.0.1:{ports.etcd_peer}"
    etcd = {
        "data-dir": str(layout.root / "etcd"),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
        "log-level": "warn",
    }
    apiserver = {
        "etcd-servers": client,
        # A network of its own has nothing but loopback in it.
        "bind-address": "0.0.0.0" if options.private_network else "127.0.0.1",
        "advertise-address": "127.0.0.1",
        "secure-port": str(ports.api),
        "tls-cert-file": f"{pki}/apiserver.crt",
        "tls-private-key-file": f"{pki}/apiserver.key",
        "client-ca-file": f"{pki}/ca.crt",
        "cert-dir": f"{layout.root}/api-certs",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": f"{pki}/tokens.pub",
        "service-account-signing-key-file": f"{pki}/tokens.key",
        "service-cluster-ip-range": SERVICE_RANGE,
        "authorization-mode": "Node,RBAC",
        "enable-admission-plugins": "NodeRestriction",
        "kubelet-client-certificate": f"{pki}/kubelet-client.crt",
        "kubelet-client-key": f"{pki}/kubelet-client.key",
        "kubelet-certificate-authority": f"{pki}/ca.crt",
        # The kubelet listens on loopback under its node's name, which the private hosts file knows.
        "kubelet-preferred-address-types": "Hostname",
        "allow-privileged": "true",
        "endpoint-reconciler-type": "none",
    }
    controllers = {
        "kubeconfig": f"{pki}/controllers.kubeconfig",
        "secure-port": "0",
        "service-account-private-key-file": f"{pki}/tokens.key",
        "root-ca-file": f"{pki}/ca.crt",
        "use-service-account-credentials": "true",
        "leader-elect": "false",
        # With the default limits it takes 9 s, not 5, until the first service account exists.
        "kube-api-qps": "500",
        "kube-api-burst": "1000",
        # The default folder would be made below /usr.
        "flex-volume-plugin-dir": f"{layout.root}/volume-plugins",
    }
    scheduler_config = layout.root / "scheduler.json"
    scheduler_config.write_text(
        json.dumps(
            {
                "apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "KubeSchedulerConfiguration",
                "clientConnection": {"kubeconfig": f"{pki}/scheduler.kubeconfig"},
                "leaderElection": {"leaderElect": False},
                **options.scheduler_config,
            }
        )
    )
    scheduler = {"config": str(scheduler_config), "secure-port": "0"}
    return {
        # On SIGTERM etcd waits several seconds for its watchers; its data end with the cluster anyway.
        "etcd": program("etcd", "etcd", etcd, "--unsafe-no-fsync", stop=signal.SIGKILL),
        "api": program("api", "kube-apiserver", apiserver, *options.apiserver_flags),
        "kcm": program("kcm", "kube-controller-manager", controllers),
        "sched": program("sched", "kube-scheduler", scheduler, *options.scheduler_flags),
    }
