"""Container images without a registry: one-layer OCI archives that `ctr images import` takes.

Format: OCI image specification 1.1, image layout and image manifest.
"""

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
FOLDERS = ("bin", "dev", "etc", "proc", "root", "run", "sys", "tmp", "var")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Contents of an image: files by path (no leading slash) and symbolic links to absolute targets."""

    name: str
    entrypoint: Sequence[str]
    programs: Mapping[str, Path]
    links: Mapping[str, str] = field(default_factory=dict)


def write_archive(image: Image, archive: Path) -> None:
    """Write `image` as an OCI image layout in an uncompressed tar file."""
    layer = _layer(image)
    packed = gzip.compress(layer, compresslevel=1, mtime=0)
    config = _json(
        {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Entrypoint": list(image.entrypoint), "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar+gzip", packed)],
        }
    )
    # containerd takes the image's name from its own annotation; the standard one carries only the tag.
    names = {
        "io.containerd.image.name": image.name,
        "org.opencontainers.image.ref.name": image.name.rpartition(":")[2],
    }
    entry = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest) | {"annotations": names}
    with tarfile.open(archive, "w") as out:
        _add(out, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(out, "index.json", _json({"schemaVersion": 2, "manifests": [entry]}))
        for blob in (config, manifest, packed):
            _add(out, "blobs/" + _digest(blob).replace(":", "/"), blob)


def _layer(image: Image) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as out:
        for name in FOLDERS:
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            out.addfile(info)
        _add(out, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")
        _add(out, "etc/group", b"root:x:0:\nnogroup:x:65534:\n")
        for path, source in image.programs.items():
            _add(out, path, source.read_bytes(), mode=0o755)
        for path, target in image.links.items():
            info = tarfile.TarInfo(path)
            info.type, info.linkname = tarfile.SYMTYPE, target
            out.addfile(info)
    return buffer.getvalue()


def _add(out: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    out.addfile(info, io.BytesIO(content))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}
