"""Other projects' programs that `make test-peers` runs beside ours, with the manifests of their modules."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.build import cache, golang
from tests.cluster.build.cache import Report
from tests.cluster.build.commands import run
from tests.cluster.build.families import GoFamily

EARLIER_KUBERNETES = "1.36"
"""The oldest minor whose API server keeps claims (DRA) exact, beside the default one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """`module`: where its manifests are; `manifests`: folders in it."""

    family: GoFamily
    module: str
    manifests: tuple[str, ...]
    minutes: int  # that it takes on two cores that do nothing else

    def key(self) -> str:
        return self.family.key()


KUEUE = Peer(
    family=GoFamily(
        name="kueue",
        version="0.19.0",
        module="kueue",
        programs={"sigs.k8s.io/kueue/cmd/kueue": "kueue"},
        ldflags="-X sigs.k8s.io/kueue/pkg/version.GitVersion=v0.19.0",
    ),
    module="sigs.k8s.io/kueue",
    manifests=("config/components/crd/bases", "config/components/webhook"),
    minutes=10,
)
KARPENTER = Peer(
    family=GoFamily(
        name="karpenter",
        version="1.13.0",
        module="karpenter",
        programs={"sigs.k8s.io/karpenter/kwok": "karpenter"},
    ),
    module="sigs.k8s.io/karpenter",
    manifests=("pkg/apis/crds", "kwok/apis/crds"),
    minutes=5,
)
KWOK = Peer(
    family=GoFamily(
        name="kwok", version="0.8.0", module="kwok", programs={"sigs.k8s.io/kwok/cmd/kwok": "kwok"}
    ),
    module="sigs.k8s.io/kwok",
    manifests=("kustomize/stage",),
    minutes=2,
)
NVIDIA_DRA = Peer(
    family=GoFamily(
        name="nvidia-dra",
        version="0.4.1",
        module="nvidia-dra",
        programs={"sigs.k8s.io/dra-driver-nvidia-gpu/cmd/gpu-kubelet-plugin": "gpu-kubelet-plugin"},
        # Functions of NVML are bound when they are called.
        ldflags="-extldflags=-Wl,-z,lazy",
        cgo=True,
    ),
    module="sigs.k8s.io/dra-driver-nvidia-gpu",
    # Its manifests are a chart's templates.
    manifests=(),
    minutes=3,
)
PEERS = (KUEUE, KARPENTER, KWOK, NVIDIA_DRA)


@dataclass(frozen=True, slots=True)
class BuiltPeer:
    program: Path
    manifests: Path


def built(peer: Peer, report: Report = lambda _line: None) -> BuiltPeer:
    """A peer's program and manifests, built on a miss. Raises BuildError."""
    folder = cache.folder(peer.family.label, peer.key(), _fill(peer, report), report)
    (name,) = peer.family.programs.values()
    return BuiltPeer(folder / "bin" / name, folder / "manifests")


def _fill(peer: Peer, report: Report) -> Callable[[Path], None]:
    def fill(into: Path) -> None:
        go = golang.find_go(report)
        golang.compile_family(go, peer.family, into, report)
        listing = [go, "list", "-mod=readonly", "-m", "-f", "{{.Dir}}", peer.module]
        env = {"GOTOOLCHAIN": "local", "GOWORK": "off"}
        found = run(f"looking for {peer.module}", listing, timeout=60, cwd=peer.family.folder, env=env)
        for folder in peer.manifests:
            source = Path(found.strip()) / folder
            for path in source.rglob("*.yaml"):
                target = into / "manifests" / folder / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                # The module's cache is read-only, and copies would be, too.
                shutil.copyfile(path, target)

    return fill
