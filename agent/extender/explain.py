"""Explains why a pod waits or failed at admission, node by node; works without a running extender."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from agent.cluster.api import ApiError, KubeApi, connect
from agent.cluster.lean import NoClusterAccess
from agent.extender.eviction import would_have_to_go
from agent.extender.fleet import Fleet
from agent.extender.free_capacity import PodClaim
from agent.extender.ledger_sync import BOUND
from agent.extender.objects import WatchedPod, as_model, asks_for_share, decode_pod, read_node, read_pod
from agent.extender.pod_demand import PodDemand, pod_demand
from agent.model.pod import STATIC_PODS, Impossible

LIST_SECONDS = 60.0
# In an answer, of which one is held at a time: pods have 6 to 10 KB, nodes with many images 30 KB.
PAGE_ITEMS = 100
MIRROR = "kubernetes.io/config.mirror"  # the kubelet sets it on the object of a static pod
BOUND_TO = "is bound to node"
MOST_NODES = 3  # for which the output names the pods that would have to end


class CannotExplain(Exception):
    """A needed object cannot be read; the text says why."""


async def explained(namespace: str, name: str, kubeconfig: Path | None) -> dict[str, Any]:
    """Lines for people, and whether the pod is bound. Raises CannotExplain."""
    try:
        async with await connect(kubeconfig) as api:
            lines = await explain(api, namespace, name)
            return {"pod": f"{namespace}/{name}", "bound": BOUND_TO in lines[0], "lines": lines}
    except NoClusterAccess as error:
        remedy = "" if kubeconfig else "; name one with --kubeconfig, or run this in the agent's pod"
        raise CannotExplain(f"{error}{remedy}") from error
    except (ApiError, msgspec.DecodeError) as error:
        raise CannotExplain(str(error)) from error


async def explain(api: KubeApi, namespace: str, name: str) -> list[str]:
    """Explain a pod over an open connection. Raises ApiError, msgspec.DecodeError."""
    who = f"{namespace}/{name}"
    pod = decode_pod(await api.get(f"/api/v1/namespaces/{namespace}/pods/{name}"))
    model, status = as_model(pod), pod.status
    # The kubelet refused it: it has failed, and no container of it was ever looked at.
    refused = status.phase == "Failed" and not (status.container_statuses or status.init_container_statuses)
    if pod.spec.node_name and not refused:
        static = MIRROR in pod.metadata.annotations and asks_for_share(model)
        return [f"pod {who} {BOUND_TO} {pod.spec.node_name}", *([STATIC_PODS] if static else ())]
    lines = _refusal(pod) if refused else []
    try:
        demand = pod_demand(model)
    except Impossible as error:
        which = "another one would fit on no node either" if refused else f"pod {who} fits on no node"
        return [*lines, f"{which}, whatever ends: {error}"]
    if demand.nothing and pod.spec.resource_claims and not lines:
        claims = ", ".join(each.name for each in pod.spec.resource_claims)
        more = f"kubectl gpu explain {who} says what they ask for"
        return [f"pod {who} asks by claims ({claims}), judged by kube-scheduler; {more}"]
    if demand.nothing:
        return lines or [f"pod {who} asks for no GPU; see its events for what else it waits for"]
    if refused:
        lines.append("for another one like it:")
    return [*lines, *_lines(who, demand, await _fleet(api))]


def _refusal(pod: WatchedPod) -> list[str]:
    """The kubelet's words on a pod that it refused at admission."""
    meta, status, node = pod.metadata, pod.status, pod.spec.node_name or "its node"
    lines = [
        f"pod {meta.namespace}/{meta.name} was refused at admission by {node} and never started",
        f"  {status.reason or 'no reason'}: {' '.join(status.message.split()) or 'no message'}",
    ]
    if meta.owner_references:
        owner = meta.owner_references[0]
        return [*lines, f"it stays Failed; its {owner.kind} {owner.name} creates another one"]
    return [*lines, "it stays Failed: delete it and create it again"]


async def _fleet(api: KubeApi) -> Fleet:
    fleet = Fleet()
    limit = {"limit": str(PAGE_ITEMS)}
    async for page in api.pages("/api/v1/nodes", limit, LIST_SECONDS):
        for raw in page.items:
            fleet.set_node(read_node(raw)[1])
    async for page in api.pages("/api/v1/pods", {"fieldSelector": BOUND, **limit}, LIST_SECONDS):
        for raw in page.items:
            if pod := read_pod(raw)[1]:
                fleet.set_pod(pod)
    return fleet


def _lines(who: str, demand: PodDemand, fleet: Fleet) -> list[str]:
    wants = ", ".join(f"{count} {resource}" for resource, count in demand.totals)
    verdicts = {name: _verdict(name, demand, fleet) for name in sorted(fleet.nodes)}
    fitting = [name for name, reason in verdicts.items() if not reason]
    lines = [f"pod {who} asks for {wants}"]
    if fitting:
        more = f" and {len(fitting) - 5} more" if len(fitting) > 5 else ""
        lines.append(f"its GPUs are free on {', '.join(fitting[:5])}{more}; see its events for other reasons")
        return lines
    lines.append(f"it fits on none of {len(verdicts)} nodes:")
    reasons = Counter(verdicts.values())
    for reason, count in reasons.most_common():
        examples = [name for name, text in verdicts.items() if text == reason][:3]
        lines.append(f"  {count} x {reason} ({', '.join(examples)}{', ...' if count > 3 else ''})")
    lines += _what_would_help(demand, fleet)
    return lines


def _verdict(name: str, demand: PodDemand, fleet: Fleet) -> str:
    if not fleet.verdict(name, demand) and (others := fleet.of_other_doors(name, demand)):
        if fleet.inventory(name):
            return "its GPUs are devices of DRA, judged by kube-scheduler"
        return f"no {others[0]} offered, unless a DRA driver serves it"
    return fleet.verdict(name, demand)


def _what_would_help(demand: PodDemand, fleet: Fleet) -> list[str]:
    options: list[tuple[int, int, str, list[PodClaim]]] = []
    for name, node in fleet.nodes.items():
        if node.inventory and (going := would_have_to_go(fleet, name, demand)):
            size = sum(slot.demand.cores for one in going for slot in one.demand.slots)
            options.append((len(going), size, name, going))
    if not options:
        return ["no pod's end would make room: it is the GPUs' mode, health or number"]
    lines = ["it would fit if these ended:"]
    for _, _, name, going in sorted(options, key=lambda option: option[:3])[:MOST_NODES]:
        pods = ", ".join(claim.name or "a pod" for claim in going)
        lines.append(f"  on {name}: {pods}")
    return lines
