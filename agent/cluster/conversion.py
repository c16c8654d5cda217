"""The API's pods as the model knows them."""

from collections.abc import Mapping

from agent.cluster.pods import Pod as ApiPod
from agent.model.demand import Container, Pod, Stage, units


def convert(pod: ApiPod) -> Pod:
    """The API's pod as the model knows it; limits that are not whole numbers of units are left out."""
    spec = pod.spec
    containers = [
        Container(
            each.name,
            _limits(each.resources.limits),
            Stage.SIDECAR if each.restart_policy == "Always" else Stage.INIT,
        )
        for each in spec.init_containers
    ]
    containers += [Container(each.name, _limits(each.resources.limits)) for each in spec.containers]
    return Pod(
        pod.metadata.namespace,
        pod.metadata.name,
        tuple(containers),
        pod.metadata.uid,
        pod.metadata.annotations,
        pod.status.phase,
        pod.metadata.deletion_timestamp is not None,
    )


def _limits(limits: Mapping[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for resource, quantity in limits.items():
        if "/" in resource:  # extended resources alone: those count whole units
            try:
                found[resource] = units(quantity)
            except ValueError:
                continue
    return found
