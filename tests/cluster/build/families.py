"""The programs of the test cluster: the pinned program families and how each is compiled.

The dependency lists stand in `modules/<folder>/go.mod` and `go.sum`; nothing else is fetched by version.
A family's key covers everything that can change its binaries: an edit here or there makes a new cache folder
for that family and leaves the others alone.
"""

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.build.errors import BuildError

MODULES = Path(__file__).parent / "modules"
DEFAULT_KUBERNETES = "1.37"
KUBERNETES_VERSIONS: Mapping[str, str] = {"1.34": "1.34.4", "1.36": "1.36.5", "1.37": "1.37.2"}
"""Minor -> pinned release. A further minor needs its own `modules/kubernetes-<minor>` and a line here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoFamily:
    """Go programs that are compiled together from one module folder."""

    name: str
    version: str
    module: str
    programs: Mapping[str, str]
    """Import path -> name of the binary."""
    ldflags: str = ""
    tags: str = ""
    static_seccomp: bool = False
    """Link statically against libseccomp (cgo)."""
    cgo: bool = False
    """Link against the machine's libc. Families with neither are built without cgo."""
    architecture: str = ""
    """Debian's name of the processor that a cgo family is built for; empty: the machine's own."""
    modules: Path = MODULES

    @property
    def label(self) -> str:
        return f"{self.name}-{self.version}"

    @property
    def folder(self) -> Path:
        return self.modules / self.module

    def key(self) -> str:
        """Twelve hex digits over the recipe, the locked modules and the architecture."""
        recipe = (
            f"{self.name} {sorted(self.programs.items())} {self.ldflags} {self.tags} {self.static_seccomp}"
        ) + (" cgo" if self.cgo else "")
        recipe += f" for {self.architecture}" if self.architecture else ""
        digest = hashlib.sha256(f"{recipe} {platform.machine()}".encode())
        for lock in ("go.mod", "go.sum"):
            digest.update((self.folder / lock).read_bytes())
        return digest.hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """The families of one cluster."""

    kubernetes: GoFamily
    etcd: GoFamily = field(
        default_factory=lambda: GoFamily(
            name="etcd", version="3.7.3", module="etcd", programs={"go.etcd.io/etcd/server/v3": "etcd"}
        )
    )
    containerd: GoFamily = field(
        default_factory=lambda: GoFamily(
            name="containerd",
            version="2.4.2",
            module="containerd",
            programs={
                f"github.com/containerd/containerd/v2/cmd/{name}": name
                for name in ("containerd", "containerd-shim-runc-v2", "ctr")
            },
            ldflags="-X github.com/containerd/containerd/v2/version.Version=v2.4.2",
        )
    )
    runc: GoFamily = field(
        default_factory=lambda: GoFamily(
            name="runc",
            version="1.5.2",
            module="runc",
            programs={"github.com/opencontainers/runc": "runc"},
            ldflags="-linkmode external -extldflags -static",
            # Without seccomp runc refuses the profile that containerd gives every sandbox.
            tags="seccomp netgo osusergo",
            static_seccomp=True,
        )
    )

    def all(self) -> tuple[GoFamily, ...]:
        return (self.kubernetes, self.etcd, self.containerd, self.runc)


def kubernetes_minor() -> str:
    """The minor asked for by the environment variable K8S, else the default; unknown minors are refused."""
    minor = os.environ.get("K8S") or DEFAULT_KUBERNETES
    if minor not in KUBERNETES_VERSIONS:
        known = ", ".join(KUBERNETES_VERSIONS)
        raise BuildError(f"K8S={minor}: no such Kubernetes minor is pinned here; set K8S to one of: {known}")
    return minor


def families(minor: str) -> Families:
    """The families of a cluster of Kubernetes `minor` (a key of KUBERNETES_VERSIONS)."""
    version = KUBERNETES_VERSIONS[minor]
    commands = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet")
    # Built outside its own release tool, the kubelet would call itself v0.0.0-master and nodes show that.
    stamps = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return Families(
        kubernetes=GoFamily(
            name="kubernetes",
            version=version,
            module=f"kubernetes-{minor}",
            programs={f"k8s.io/kubernetes/cmd/{command}": command for command in commands},
            ldflags=" ".join(f"-X {package}.gitVersion=v{version}" for package in stamps),
        )
    )
