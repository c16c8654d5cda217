"""Reads ConfigMaps from files and folders, and from a cluster. Blocks."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import yaml

from agent.check.configmaps import NAMESPACE, Found, concerns

SUFFIXES = (".yaml", ".yml", ".json")


class Unreadable(Exception):
    """A file or the cluster could not be read; the text names it and the cause."""


def from_files(paths: Sequence[Path]) -> list[Found]:
    """cf-crl objects of files; of folders, those of every YAML and JSON file. Raises Unreadable."""
    return [
        Found(str(file), content)
        for path in paths
        for file in _files(path)
        for content in _documents(file)
        if concerns(content)
    ]


def from_cluster(kubeconfig: Path | None) -> list[Found]:
    """cf-crl objects of the cluster. Raises Unreadable."""
    return anyio.run(_from_cluster, kubeconfig)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    return [path]


def _documents(file: Path) -> Iterator[dict[str, Any]]:
    try:
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            yield from _objects(document)
    except OSError as error:
        raise Unreadable(f"{file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Unreadable(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error


def _objects(document: object) -> Iterator[dict[str, Any]]:
    """A document, or the items of a list (`kubectl get -o yaml` makes one)."""
    if not isinstance(document, dict):
        return
    if str(document.get("kind", "")).endswith("List") and isinstance(document.get("items"), list):
        for item in document["items"]:
            # Items of a typed list do not say their kind.
            yield from _objects({"kind": "ConfigMap", **item} if isinstance(item, dict) else item)
    else:
        yield document


async def _from_cluster(kubeconfig: Path | None) -> list[Found]:
    from agent.cluster.api import ApiError, connect  # noqa: PLC0415  loads the API client
    from agent.cluster.lean import NoClusterAccess  # noqa: PLC0415

    try:
        async with await connect(kubeconfig) as api:
            data = await api.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps")
    except NoClusterAccess as error:
        raise Unreadable(f"{error}; name one with --kubeconfig") from error
    except ApiError as error:
        raise Unreadable(str(error)) from error
    return [Found("cluster", content) for content in _objects(msgspec.json.decode(data)) if concerns(content)]
