"""Pods of the scenario suite on a real cluster: their manifests, and what their containers report."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent.simulator.kubelet.pod_specs import ContainerSpec, PodSpec
from tests.cluster import manifests

ENVIRONMENT, NODES, END = "--- environment", "--- device nodes", "--- end"
REPORT = f"""
echo '{ENVIRONMENT}'
base64 /proc/1/environ
echo '{NODES}'
find /dev -name 'nvidia*' '(' -type c -o -type b ')'
echo '{END}'
"""
ENDS_ITSELF = "trap 'exit 0' TERM; sleep {} & wait $!"
UNTIL_DELETED = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"


@dataclass(frozen=True, slots=True)
class Report:
    """The environment that a container found at its start."""

    environment: Mapping[str, str]
    device_nodes: frozenset[str]


def templates(pod: PodSpec) -> list[dict[str, Any]]:
    """The templates that the pod's claims are made from."""
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": f"{pod.name}-{each.name}", "namespace": pod.namespace},
            "spec": {"spec": dict(each.template)},
        }
        for each in pod.claims
        if each.template is not None
    ]


def manifest(pod: PodSpec, node: str) -> dict[str, Any]:
    """The pod as the API takes it; any preset node name means `node`."""
    made = manifests.pod(
        pod.name,
        *(_container(each, ends=each.exits) for each in pod.containers),
        init=[_container(each, ends=not each.restartable) for each in pod.init_containers],
        restart_policy=pod.restart_policy,
        **({"hostPID": True} if pod.host_pid else {}),
        **({"nodeName": node} if pod.node_name is not None else {}),
    )
    for each in pod.claims:
        source = (
            {"resourceClaimName": each.claim}
            if each.claim
            else {"resourceClaimTemplateName": f"{pod.name}-{each.name}"}
        )
        made["spec"].setdefault("resourceClaims", []).append({"name": each.name, **source})
    made["metadata"] |= {"namespace": pod.namespace, "annotations": dict(pod.annotations)}
    return made


def _container(spec: ContainerSpec, *, ends: bool) -> dict[str, Any]:
    script = REPORT + (ENDS_ITSELF.format(spec.seconds) if ends else UNTIL_DELETED)
    made = manifests.container(spec.name, ["sh", "-c", script], limits=spec.limits, env=spec.env)
    if spec.claims:
        made["resources"]["claims"] = [{"name": each} for each in spec.claims]
    if spec.restartable:
        made["restartPolicy"] = "Always"
    return made


def read_report(log: str) -> Report | None:
    """The report in a container's log; None while it is not complete."""
    head, found, _ = log.partition(END)
    if not found:
        return None
    encoded, _, nodes = head.partition(ENVIRONMENT)[2].partition(NODES)
    try:
        environ = base64.b64decode("".join(encoded.split()), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError(f"a container's report cannot be read: {error}\n{log[:500]}") from error
    pairs = (item.partition("=") for item in environ.split("\0") if item)
    return Report({name: value for name, _, value in pairs}, frozenset(nodes.split()))


def waiting_of(pod: dict[str, Any]) -> str:
    """Why containers wait; that the pod is being deleted."""
    states = [each.get("state", {}).get("waiting", {}) for each in pod["status"].get("containerStatuses", ())]
    told = [f"{each.get('reason', '')} {each.get('message', '')}".strip() for each in states if each]
    ending = pod["metadata"].get("deletionTimestamp")
    if pod["status"]["phase"] == "Failed":
        bound = [
            c["lastTransitionTime"]
            for c in pod["status"].get("conditions", ())
            if c["type"] == "PodScheduled"
        ]
        told += [f"bound at {bound}, refused at {pod['status'].get('startTime')}"]
    return "; ".join([*told, f"to be gone at {ending}"] if ending else told)
