"""Clusters as the API server lists them, and a viewer's way to it."""

import json
import re
from collections.abc import Callable
from typing import Any

from agent.kubectl.kube import MissingRight, NotFound
from agent.kubectl.view import HOLDERS, INVENTORY, PREFIX, STATE
from agent.node.annotations import digest

Object = dict[str, Any]


def node(
    name: str,
    *gpus: Object,
    annotations: dict[str, str] | None = None,
    state: Object | None = None,
    **spec: Any,
) -> Object:
    """A node; each of `gpus` as `gpu` makes it."""
    document = {"state": "applied", "desired": "vgpu", "message": "", "gpus": {}, **(state or {})}
    notes = {
        INVENTORY: json.dumps({"v": 1, "gpus": [each["inventory"] for each in gpus]}),
        HOLDERS: json.dumps({"v": 1, "gpus": {each["inventory"]["u"]: each["held"] for each in gpus}}),
        STATE: json.dumps(document),
        **(annotations or {}),
    }
    labels = {f"{PREFIX}mode": document["desired"]}
    return {
        "metadata": {"name": name, "annotations": notes, "labels": labels, "resourceVersion": "7"},
        "spec": spec,
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }


def gpu(
    index: int, *holders: tuple[str, int, int], mode: str = "vgpu", node: str = "a", **more: Any
) -> Object:
    total = [100, 320, 256] if mode == "vgpu" else [1, 0, 0]
    return {
        "inventory": {"u": f"GPU-{node}-{index}", "i": index, "m": mode, "mem": 81920, **more},
        "held": {"t": total, "h": [[digest(uid), cores, blocks] for uid, cores, blocks in holders]},
    }


def pod(
    name: str, cores: int = 30, blocks: int = 16, *, node: str = "", gpus: int = 0, **more: Any
) -> Object:
    """namespace/name, whose UID is its name."""
    space, _, short = name.partition("/")
    share = {"tencent.com/vcuda-core": str(cores), "tencent.com/vcuda-memory": str(blocks)}
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else share
    return {
        "metadata": {"namespace": space, "name": short, "uid": name, **more},
        "spec": {
            "containers": [{"name": "main", "resources": {"limits": limits}}],
            **({"nodeName": node} if node else {}),
        },
        "status": {"phase": "Running" if node else "Pending"},
    }


def viewer(
    nodes: list[Object], pods: list[Object], own: str | None = None, *, nodes_read: bool = True
) -> Callable[[str], Object]:
    """`get` of an account: of everything, or of nodes and the pods of its own namespace."""

    def get(path: str) -> Object:
        path = path.partition("?")[0]
        if path.startswith("/api/v1/nodes"):
            if not nodes_read:
                raise MissingRight("list", "nodes", "")
            name = path.removeprefix("/api/v1/nodes").removeprefix("/")
            found = [each for each in nodes if name in ("", each["metadata"]["name"])]
            if name and not found:
                raise NotFound(name)
            return found[0] if name else {"items": found}
        match = re.fullmatch(r"/api/v1(?:/namespaces/([^/]+))?/(pods|events)(?:/(.+))?", path)
        assert match, path
        space, kind, name = match[1], match[2], match[3]
        if own and space != own:
            raise MissingRight("list", kind, space or "")
        if kind == "events":
            return {"items": []}
        mine = [each for each in pods if space in (None, each["metadata"]["namespace"])]
        if name:
            return next(each for each in mine if each["metadata"]["name"] == name)
        return {"items": mine}

    return get
