"""A node's container runtime and kubelet: what they are started with."""

import json
import shutil
from pathlib import Path

from tests.cluster.build import Parts
from tests.cluster.build.parts import PAUSE_IMAGE
from tests.cluster.layout import Layout
from tests.cluster.namespace import Namespace, Program
from tests.cluster.options import Options
from tests.cluster.pki import Authority

CAP_SYS_RESOURCE = 24


def make_certificates(authority: Authority, node: str, server: str) -> None:
    """The kubelet's two certificates: as client of the API server, and as server for logs and exec."""
    subject = f"/O=system:nodes/CN=system:node:{node}"
    authority.sign("kubelet", subject, usage="clientAuth")
    names = f"DNS:{node},DNS:localhost,IP:127.0.0.1"
    authority.sign("kubelet-server", subject, usage="serverAuth", alternatives=names)
    authority.kubeconfig("kubelet", server)


def programs(
    parts: Parts, namespace: Namespace, layout: Layout, node: str, cgroup: str, port: int, options: Options,
    env: dict[str, str],
) -> dict[str, Program]:  # fmt: skip
    """containerd and kubelet by name, not started. `port` is the kubelet's."""
    containerd_config = layout.containerd / "config.toml"
    containerd_config.write_text(_containerd_config(parts, layout, _snapshotter(namespace, layout)))
    kubelet_config = layout.root / "kubelet.json"
    kubelet_config.write_text(json.dumps(_kubelet_config(layout, cgroup, port, options)))
    kubelet = [
        str(parts.program("kubelet")),
        f"--config={kubelet_config}",
        f"--kubeconfig={layout.certificates}/kubelet.kubeconfig",
        f"--hostname-override={node}",
        f"--cert-dir={layout.root}/kubelet-certs",
        *options.kubelet_flags,
    ]
    argv = {
        "containerd": [str(parts.program("containerd")), "-c", str(containerd_config)],
        "kubelet": kubelet,
    }
    return {
        name: Program(name, command, namespace=namespace, log=layout.logs / f"{name}.log", env=env)
        for name, command in argv.items()
    }


def install_cni(layout: Layout, options: Options) -> None:
    """Give pods a network of their own: with a way to the node's, or with nothing but loopback in it."""
    plugin = "veth" if options.pod_network else "none"
    plugins, networks = layout.cni / "bin", layout.cni / "net.d"
    plugins.mkdir(parents=True)
    networks.mkdir()
    shutil.copyfile(Path(__file__).with_name(f"cni-{plugin}"), plugins / plugin)
    (plugins / plugin).chmod(0o755)
    network = {"cniVersion": "1.0.0", "name": "test-pods", "plugins": [{"type": plugin}]}
    (networks / f"10-{plugin}.conflist").write_text(json.dumps(network))


def _snapshotter(namespace: Namespace, layout: Layout) -> str:
    """overlayfs where the state folder can carry one (not on an overlay itself), else plain copies."""
    probe = layout.root / "probe"
    folders = {name: probe / name for name in ("lower", "upper", "work", "merged")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    options = ",".join(f"{name}dir={folders[name]}" for name in ("lower", "upper", "work"))
    script = f"mount -t overlay overlay -o {options} {folders['merged']} && umount {folders['merged']}"
    try:
        refused = namespace.run(["sh", "-c", f"{script} 2>/dev/null || echo refused"]).strip()
    finally:
        shutil.rmtree(probe)
    return "native" if refused else "overlayfs"


def _may_lower_oom_score() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_RESOURCE & 1)
    return False


def _containerd_config(parts: Parts, layout: Layout, snapshotter: str) -> str:
    root = layout.containerd
    # Without CAP_SYS_RESOURCE the sandbox's negative OOM score is refused and no pod would start.
    restrict = "false" if _may_lower_oom_score() else "true"
    return f"""\
version = 3
root = "{root}/root"
state = "{root}/state"
oom_score = 0
imports = []

[grpc]
  address = "{layout.containerd_socket}"

[ttrpc]
  address = "{layout.containerd_socket}.ttrpc"

[plugins."io.containerd.cri.v1.images"]
  snapshotter = "{snapshotter}"

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = {restrict}
  netns_mounts_under_state_dir = true
  cdi_spec_dirs = ["{layout.cdi}"]

[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{layout.cni}/bin"]
  conf_dir = "{layout.cni}/net.d"
  use_internal_loopback = true

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  BinaryName = "{parts.program("runc")}"
  Root = "{root}/runc"
  SystemdCgroup = false

[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"

[plugins."io.containerd.nri.v1.nri"]
  socket_path = "{root}/nri.sock"
  plugin_path = "{root}/nri-plugins"
  plugin_config_path = "{root}/nri-config"
"""


def _kubelet_config(layout: Layout, cgroup: str, port: int, options: Options) -> dict[str, object]:
    pki = layout.certificates
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "127.0.0.1",
        "port": port,
        "healthzPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/kubelet-server.crt",
        "tlsPrivateKeyFile": f"{pki}/kubelet-server.key",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "nodeStatusUpdateFrequency": f"{round(options.status_tick * 1000)}ms",
        "nodeStatusReportFrequency": f"{round(max(options.status_tick, 10) * 1000)}ms",
        "volumePluginDir": f"{layout.root}/volume-plugins",
        "resolvConf": "",
        # The machine's disks and memory are shared with the tests and their user: evict at the very end only.
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "imageGCHighThresholdPercent": 100,
        # Else the kubelet adds chains to the host's packet filter and leaves them there.
        "makeIPTablesUtilChains": False,
        **options.kubelet_config,
    }
