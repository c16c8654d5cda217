"""Pods that ask for GPUs by claims (DRA): kube-scheduler allocates them, so what it says counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from agent.kubectl.kube import Get, KubectlFailed, MissingRight, NotFound
from agent.kubectl.view import PREFIX, Document, pod_name

DRIVER = PREFIX.rstrip("/")
DRA = "dra"  # the mode of GPUs that are devices for claims
RESOURCES_API = "/apis/resource.k8s.io/v1"
CLASSES = ("gpu-whole", "gpu-mps")  # the chart's
MOST_CLAIMS = 8  # of one pod that are explained


def claim_names(pod: Document) -> dict[str, str]:
    """The claims of a pod by the names that it uses; empty: it is not made of its template yet."""
    status = pod.get("status", {})
    made = {
        each.get("name"): each.get("resourceClaimName") for each in status.get("resourceClaimStatuses") or []
    }
    found = {
        str(each["name"]): str(each.get("resourceClaimName") or made.get(each["name"]) or "")
        for each in pod.get("spec", {}).get("resourceClaims") or []
    }
    # Where a class serves `limits`, kube-scheduler makes the claim.
    if extended := (status.get("extendedResourceClaimStatus") or {}).get("resourceClaimName"):
        found["(of its limits)"] = str(extended)
    return found


def claims_wait(pod: Document) -> bool:
    """Whether a pod with claims has no node yet."""
    waits = not pod.get("spec", {}).get("nodeName") and pod.get("status", {}).get("phase") == "Pending"
    return waits and bool(claim_names(pod))


def claimants(get: Get, namespace: str, pods: list[Document], missing: list[str]) -> list[Document]:
    """Those of `pods` that wait for claims of this product's devices."""
    waiting = [pod for pod in pods if claims_wait(pod)]
    if not waiting:
        return []
    listed: list[Document] = []
    within = f"{RESOURCES_API}/namespaces/{quote(namespace, safe='')}/resourceclaims"
    for path in (f"{RESOURCES_API}/resourceclaims", within):
        try:
            listed = get(path)["items"]
            break
        except MissingRight as error:
            missing.append(str(error))
        except KubectlFailed:
            break  # an API server without the group
    classes = _classes(get)
    ours = {
        f"{each['metadata'].get('namespace')}/{each['metadata']['name']}"
        for each in listed
        if _is_ours(each, classes)
    }
    return [
        pod
        for pod in waiting
        if ours & {f"{pod['metadata'].get('namespace')}/{name}" for name in claim_names(pod).values()}
    ]


def _classes(get: Get) -> set[str]:
    """The DeviceClasses that select this driver's devices, as far as the viewer may read them."""
    found = {*CLASSES}
    try:
        for each in get(f"{RESOURCES_API}/deviceclasses")["items"]:
            if DRIVER in str(each.get("spec", {}).get("selectors")):
                found.add(each["metadata"]["name"])
    except KubectlFailed:
        pass
    return found


def _is_ours(claim: Document, classes: set[str]) -> bool:
    results = _results(claim)
    if results:
        return any(each.get("driver") == DRIVER for each in results)
    return any(each.get("deviceClassName") in classes for _, each in _asked(claim))


def _results(claim: Document) -> list[Document]:
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return (allocation.get("devices") or {}).get("results") or []


def _asked(claim: Document) -> Iterator[tuple[str, Document]]:
    for each in (claim.get("spec", {}).get("devices") or {}).get("requests") or []:
        for one in [each.get("exactly") or {}, *(each.get("firstAvailable") or [])]:
            if one:
                yield str(each.get("name", "")), one


def explained_claims(get: Get, pod: Document) -> list[str]:
    """Each claim of a pod: its requests, its devices, and why the driver refused it."""
    lines: list[str] = []
    space = quote(str(pod["metadata"].get("namespace", "default")), safe="")
    for use, name in list(claim_names(pod).items())[:MOST_CLAIMS]:
        if not name:
            lines.append(f"  claim {use}: not made of its template yet; does the template exist?")
            continue
        try:
            claim = get(f"{RESOURCES_API}/namespaces/{space}/resourceclaims/{quote(name, safe='')}")
        except NotFound:
            lines.append(f"  claim {use} ({name}): there is no such ResourceClaim")
            continue
        except MissingRight as error:
            lines.append(f"  claim {use} ({name}): {error}")
            continue
        lines += _claim_lines(use, name, claim)
    return lines


def _claim_lines(use: str, name: str, claim: Document) -> Iterator[str]:
    wants = "; ".join(
        f"{one.get('count', 1)} x {one.get('deviceClassName')}{_capacity(one)}" for _, one in _asked(claim)
    )
    results = _results(claim)
    if not results:
        yield f"  claim {use} ({name}) asks for {wants}: not allocated"
    for each in results:
        amounts = each.get("consumedCapacity") or {}
        parts = ", ".join(f"{key} {amounts[key]}" for key in ("cores", "memory") if key in amounts)
        yield f"  claim {use} ({name}): device {each.get('device')} of {each.get('pool')}" + (
            f", {parts}" if parts else ""
        )
    for device in (claim.get("status") or {}).get("devices") or []:
        for condition in device.get("conditions") or []:
            if device.get("driver") == DRIVER and condition.get("status") == "False":
                yield f"    refused: {condition.get('message')}"


def _capacity(request: Document) -> str:
    amounts: dict[str, Any] = (request.get("capacity") or {}).get("requests") or {}
    return " with " + ", ".join(f"{key} {value}" for key, value in sorted(amounts.items())) if amounts else ""


def explained_claimant(pod: Document, claims: list[str], nodes: list[Document]) -> list[str]:
    """A pod with claims that waits: what kube-scheduler says, and what is free by the nodes' annotations."""
    conditions = pod.get("status", {}).get("conditions") or []
    said = next((each.get("message", "") for each in conditions if each.get("type") == "PodScheduled"), "")
    lines = [
        f"pod {pod_name(pod)} waits: {' '.join(said.split()) or 'kube-scheduler has not said why'}",
        *claims,
    ]
    doors = [(node, free_devices(node)) for node in nodes if any(gpu["mode"] == DRA for gpu in node["gpus"])]
    if not doors:
        return [*lines, "no node has GPUs in mode dra"]
    lines += [
        f"  node {node['name']}: {whole} GPUs that nobody holds, the largest share is {cores} %"
        for node, (whole, cores) in sorted(doors, key=lambda each: str(each[0]["name"]))[:MOST_CLAIMS]
    ]
    return lines


def free_devices(node: Document) -> tuple[int, int]:
    """Devices for claims: GPUs that nobody holds, and the most cores that a share finds on one."""
    offered = [
        gpu
        for gpu in node["gpus"]
        if gpu["mode"] == DRA and gpu["offered"] and gpu["cordon"] is None and gpu["known"]
    ]
    whole = sum(not gpu["holders"] for gpu in offered)
    shared = [gpu["free"][0] for gpu in offered if gpu["holders"] and gpu["blockMiB"]]
    return whole, 100 if whole else max(shared, default=0)
