"""The commands: each takes its options and answers with an exit code."""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from agent.kubectl.claims import claim_names, explained_claimant, explained_claims
from agent.kubectl.cluster import cluster_view
from agent.kubectl.kube import Conflict, Kubectl, KubectlFailed, MissingRight, NotFound
from agent.kubectl.text import (
    explained_end,
    explained_running,
    explained_waiting,
    missing_rights,
    overview,
    top,
)
from agent.kubectl.view import (
    CORDON,
    OTHER,
    PAIRS,
    PREFIX,
    Document,
    VisiblePods,
    asks,
    cordons_of,
    limits_of,
    node_view,
    read,
    visible_pods,
)

MODE_LABEL = "nvidia-device-enable"
WATCH_SECONDS = 2.0
CONFLICTS = 4  # tries more where an object changes between reading and writing
ALIASES = {"enable": "vgpu", "disable": "none"}  # as the agent's state annotation names them
WORDS = ("pgpu", "vgpu", "mps", "mig", "dra", "none", *ALIASES)  # all others are names of layouts
ALL_DRAIN = "all GPUs in another mode drain until their pods end"
ENDED = ("Succeeded", "Failed")
TRY_RESOURCES = {
    "pgpu": {"nvidia.com/gpu": "1"},
    "vgpu": {"tencent.com/vcuda-core": "1", "tencent.com/vcuda-memory": "1"},
    "mps": {"nvidia.com/mps-core": "1", "nvidia.com/mps-memory": "1"},
}
TRY_SCRIPT = (
    "ls /dev/nvidia* 2>/dev/null; nvidia-smi -L 2>/dev/null; "
    "env | grep -E '^(NVIDIA|CUDA|GPU)_' | sort; echo tried"
)


def shown(
    options: argparse.Namespace, ask: Callable[[], Document], text: Callable[[Document], list[str]]
) -> None:
    """Print a document, with --watch each change of it, until interrupted."""
    before, watch = "", getattr(options, "watch", False)
    while True:
        found = ask()
        if options.output == "json":
            # One line each where documents follow one another; the time alone is no change.
            words = json.dumps(found, indent=None if watch else 2)
            state = json.dumps({**found, "at": ""})
        else:
            state = words = "\n".join(map(plain, text(found)))
        if state != before:
            before = state
            print(words, flush=True)
        if not watch:
            return
        time.sleep(WATCH_SECONDS)


def plain(line: str) -> str:
    """A line without control characters: others may have written parts of it."""
    return "".join(char if char.isprintable() else "?" for char in line)


def do_overview(kubectl: Kubectl, options: argparse.Namespace) -> int:
    names = options.output == "json"
    shown(options, lambda: cluster_view(kubectl.get, options.namespace, names), overview)
    return 0


def do_top(kubectl: Kubectl, options: argparse.Namespace) -> int:
    def ask() -> Document:
        return cluster_view(kubectl.get, options.namespace)

    live = sys.stdout.isatty() and not options.once and options.output != "json"
    while live:
        lines = top(ask(), shutil.get_terminal_size().lines)
        columns = shutil.get_terminal_size().columns
        text = "\033[K\n".join(plain(line)[:columns] for line in lines)
        print(f"\033[H{text}\033[K\033[J", end="", flush=True)
        time.sleep(WATCH_SECONDS)
    shown(options, ask, top)
    return 0


def do_explain(kubectl: Kubectl, options: argparse.Namespace) -> int:
    namespace, _, name = options.pod.rpartition("/")
    namespace = namespace or options.namespace

    def ask() -> Document:
        pod = kubectl.get(f"/api/v1/namespaces/{_quoted(namespace)}/pods/{_quoted(name)}")
        return {"pod": f"{namespace}/{name}", "lines": _explained(kubectl, pod, namespace)}

    shown(options, ask, lambda found: list(found["lines"]))
    return 0


def _explained(kubectl: Kubectl, pod: Document, namespace: str) -> list[str]:
    missing: list[str] = []
    if pod.get("status", {}).get("phase") in ENDED:
        return explained_end(pod)
    if not asks(pod) and not claim_names(pod):
        return [f"pod {namespace}/{pod['metadata']['name']} asks for no GPU; see its events"]
    where = pod["spec"].get("nodeName")
    seen = visible_pods(kubectl.get, namespace, missing)
    seen = VisiblePods([*seen.pods, pod])
    claims = explained_claims(kubectl.get, pod)
    try:
        if where:
            node = node_view(kubectl.get(f"/api/v1/nodes/{_quoted(where)}"), seen)
            lines = [*explained_running(pod, node), *claims]
        else:
            nodes = [
                view for each in kubectl.get("/api/v1/nodes")["items"] if (view := node_view(each, seen))
            ]
            lines = (
                [*explained_waiting(pod, {"nodes": nodes}), *claims]
                if asks(pod)
                else explained_claimant(pod, claims, nodes)
            )
    except MissingRight as error:
        lines = [*_without_nodes(pod, where), *claims, str(error)]
    events = _events_of(kubectl, pod, namespace, missing)
    # Names of other pods are all that the right to list them would add.
    hints = [text for text in missing if "list pods" not in text]
    return [*lines, *(f"event {each}" for each in events), *missing_rights({"missing": hints})]


def _without_nodes(pod: Document, where: str | None) -> list[str]:
    name = f"{pod['metadata'].get('namespace')}/{pod['metadata']['name']}"
    if where:
        notes = pod["metadata"].get("annotations") or {}
        limits = notes.get(f"{PREFIX}limits")
        return [f"pod {name} is bound to node {where}", *([f"  limits: {limits}"] if limits else [])]
    conditions = pod.get("status", {}).get("conditions") or []
    said = next((each.get("message", "") for each in conditions if each.get("type") == "PodScheduled"), "")
    return [f"pod {name} waits: {said or 'the scheduler has not said why'}"]


def _events_of(kubectl: Kubectl, pod: Document, namespace: str, missing: list[str]) -> list[str]:
    """Events of the agent and of the extender on the pod."""
    selector = quote(f"involvedObject.name={pod['metadata']['name']}", safe="")
    try:
        items = kubectl.get(f"/api/v1/namespaces/{_quoted(namespace)}/events?fieldSelector={selector}")[
            "items"
        ]
    except MissingRight as error:
        missing.append(str(error))
        return []
    uid = pod["metadata"].get("uid")
    return [
        f"{each.get('reason')}: {each.get('message')}"
        for each in items
        if "gpu-node" in str(each.get("source", {}).get("component", ""))
        and each["involvedObject"].get("uid") in (uid, None, "")
    ]


def do_switch(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Say what will drain, set the label, and wait where asked."""
    path = f"/api/v1/nodes/{_quoted(options.node)}"
    before = node_view(kubectl.get(path), visible_pods(kubectl.get, options.namespace, []))
    for line in _drains(before, options.mode):
        print(line, flush=True)
    if options.dry_run:
        return 0
    kubectl.run("label", "node", options.node, f"{MODE_LABEL}={options.mode}", "--overwrite")
    print(f"node {options.node}: {MODE_LABEL}={options.mode}", flush=True)
    return _waited(kubectl, path, options) if options.wait else 0


def _drains(node: Document | None, mode: str) -> list[str]:
    if node is None:
        return ["the node has no GPUs of this agent yet: nothing drains"]
    if not all(gpu["known"] for gpu in node["gpus"]):
        return [f"who holds its GPUs is not known, as its agent is of an earlier version: {ALL_DRAIN}"]
    lost = node["holdersLost"]
    lines = [f"who holds its GPUs is known as of {lost} alone"] if lost else []
    where = "" if mode in WORDS else f", if layout {mode} gives it another mode,"
    mode = ALIASES.get(mode, mode)
    for gpu in node["gpus"]:
        if gpu["mode"] == mode or not gpu["holders"]:
            continue
        names = ", ".join(each["pod"] or f"{each['pods']} {OTHER} pods" for each in gpu["holders"])
        lines.append(f"GPU {gpu['index']} ({gpu['mode']}) drains{where} until these end: {names}")
    return lines or ["nothing drains: no pod holds a GPU in another mode"]


def _waited(kubectl: Kubectl, path: str, options: argparse.Namespace) -> int:
    said, until = "", time.monotonic() + options.timeout
    while time.monotonic() < until:
        try:
            node = node_view(kubectl.get(path), visible_pods(kubectl.get, options.namespace, []))
        except (MissingRight, NotFound):
            raise
        except KubectlFailed as error:
            node, said = None, str(error)  # an API server that is away for a moment ends no wait
        taken_up = (options.mode, ALIASES.get(options.mode, options.mode))
        if node and node["desired"] in taken_up:
            if node["phase"] == "applied":
                print(f"mode {options.mode} is in force on node {options.node}")
                return 0
            text = f"{node['phase']}: {node['message']}"
            if text != said:
                said = text
                print(plain(text), flush=True)
            if node["phase"] == "blocked":
                return 1
        time.sleep(1.0)
    print(
        f"after {options.timeout:g} s mode {options.mode} is not in force: {said or 'not taken up'}",
        file=sys.stderr,
    )
    return 1


def _by_what_is_there(act: Callable[[], int]) -> int:
    """Read and write again where the object changed in between: kubelet and agent write to it, too."""
    for _ in range(CONFLICTS):
        with suppress(Conflict):
            return act()
    return act()


def do_cordon(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Write the annotation that names cordoned GPUs."""
    return _by_what_is_there(lambda: _cordon(kubectl, options))


def _cordon(kubectl: Kubectl, options: argparse.Namespace) -> int:
    node, gpu = _gpu_named(kubectl, options)
    notes = node["metadata"].get("annotations") or {}
    text = notes.get(CORDON, "")
    before = read(text) if text.lstrip().startswith("{") else {}
    odd = not all(isinstance(each, dict) for each in before.values())
    if odd or (text.lstrip().startswith("{") and not before and text.strip() != "{}"):
        raise KubectlFailed(f"annotation {CORDON} of the node cannot be read: mend or remove it first")
    known = cordons_of(text)
    for name in (str(gpu["index"]), gpu["uuid"]):
        known.pop(name, None)
    if options.on:
        known[gpu["uuid"]] = " ".join(options.reason.split())
    document = {
        name: {**(before.get(name) or {}), "reason": reason} for name, reason in sorted(known.items())
    }
    value = f"{CORDON}={json.dumps(document, separators=(',', ':'))}" if document else f"{CORDON}-"
    version = node["metadata"]["resourceVersion"]
    name = node["metadata"]["name"]
    kubectl.run("annotate", "node", name, value, "--overwrite", f"--resource-version={version}")
    pods = ", ".join(each["pod"] or f"{each['pods']} {OTHER} pods" for each in gpu["holders"])
    if options.on:
        until = f"; it drains until these end: {pods}" if pods else ""
        print(f"GPU {gpu['index']} of node {name} ({gpu['uuid']}) is cordoned{until}")
    else:
        print(f"GPU {gpu['index']} of node {name} ({gpu['uuid']}) is offered again")
    return 0


def _gpu_named(kubectl: Kubectl, options: argparse.Namespace) -> tuple[Document, Document]:
    """The node and the GPU of NODE/INDEX, or of a UUID. Raises KubectlFailed."""
    seen = visible_pods(kubectl.get, options.namespace, [])
    where, _, which = options.gpu.rpartition("/")
    nodes = (
        [kubectl.get(f"/api/v1/nodes/{_quoted(where)}")] if where else kubectl.get("/api/v1/nodes")["items"]
    )
    for node in nodes:
        view = node_view(node, seen)
        for gpu in view["gpus"] if view else []:
            if gpu["uuid"] == which or (where and str(gpu["index"]) == which):
                return node, gpu
    raise KubectlFailed(f"there is no GPU {options.gpu}: name it as NODE/INDEX, or by its UUID")


def do_resize(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Write the annotation that asks for another size of a container's share."""
    return _by_what_is_there(lambda: _resize(kubectl, options))


def _resize(kubectl: Kubectl, options: argparse.Namespace) -> int:
    if options.memory is None and options.cores is None:
        raise KubectlFailed("say to what: --memory BLOCKS, --cores PERCENT, or both")
    namespace, _, name = options.pod.rpartition("/")
    namespace = namespace or options.namespace
    pod = kubectl.get(f"/api/v1/namespaces/{_quoted(namespace)}/pods/{_quoted(name)}")
    containers = [
        each["name"]
        for each in pod["spec"]["containers"]
        if any(name in limits_of(each) for name in PAIRS["vgpu"])
    ]
    container = options.container or (containers[0] if containers else "")
    if container not in containers:
        raise KubectlFailed(
            f"pod {namespace}/{name} has no container {container!r} with a share of vGPU: {containers}"
        )
    text = (pod["metadata"].get("annotations") or {}).get(f"{PREFIX}resize", "{}")
    wanted: dict[str, Any] = read(text)
    before = wanted.get(container, {})
    asked_for = {"memory": before} if isinstance(before, int) else before if isinstance(before, dict) else {}
    amounts = {"memory": options.memory, "cores": options.cores}
    # What is not named stays as it was asked for: it may wait for units that come free.
    wanted[container] = {**asked_for, **{key: each for key, each in amounts.items() if each is not None}}
    version = f"--resource-version={pod['metadata'].get('resourceVersion', '')}"
    value = f"{PREFIX}resize={json.dumps(wanted, separators=(',', ':'))}"
    kubectl.run("annotate", "pod", name, f"--namespace={namespace}", value, "--overwrite", version)
    print(f"asked for; the event that answers: kubectl gpu explain {namespace}/{name}")
    return 0


def do_try(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Have a pod ask for the smallest share, print what its container sees, and delete it."""
    name = f"gpu-node-agent-try-{secrets.token_hex(4)}"
    pods = f"/api/v1/namespaces/{_quoted(options.namespace)}/pods"
    container = {
        "name": "share",
        "image": options.image,
        "command": ["/bin/sh", "-c", TRY_SCRIPT],
        "resources": {"limits": TRY_RESOURCES[options.mode]},
    }
    spec: Document = {"restartPolicy": "Never", "containers": [container]}
    if options.runtime_class:
        spec["runtimeClassName"] = options.runtime_class
    labels = {"app.kubernetes.io/name": "gpu-node-agent-try"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:  # a login may need the standard input
        json.dump(pod, file)
        file.flush()
        kubectl.run("create", "--raw", pods, "-f", file.name)
    try:
        return _tried(kubectl, f"{pods}/{name}", options)
    finally:
        try:
            kubectl.run("delete", "--raw", f"{pods}/{name}?gracePeriodSeconds=1")
        except NotFound:
            pass
        except KubectlFailed as error:
            print(f"the pod could not be taken away: {error}", file=sys.stderr)


def _tried(kubectl: Kubectl, path: str, options: argparse.Namespace) -> int:
    until = time.monotonic() + options.timeout
    found: Document = {}
    while time.monotonic() < until:
        found = kubectl.get(path)
        if found["status"].get("phase") in ENDED:
            break
        time.sleep(1.0)
    else:
        print("\n".join(map(plain, _explained(kubectl, found, options.namespace))), file=sys.stderr)
        return 1
    if found["status"]["phase"] != "Succeeded":
        print("\n".join(map(plain, explained_end(found))), file=sys.stderr)
        return 1
    print(kubectl.run("get", "--raw", f"{path}/log").rstrip())
    print(f"the share was given on node {found['spec']['nodeName']}")
    return 0


def _quoted(name: str) -> str:
    """A name as one part of a path. Raises KubectlFailed: without a name it would be the path of a list."""
    if not name.strip("."):
        raise KubectlFailed(f"{name!r} is no name")
    return quote(name, safe="")
