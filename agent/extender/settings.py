"""The extender's own configuration: a file of its own, since it runs in a Deployment, not on a GPU node."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from agent.cluster.reflector import SILENCE_SECONDS
from agent.kit import configuration
from agent.kit.configuration import ConfigurationError, Section
from agent.kit.logs import Logging
from agent.model.placement import USUAL

# How long the extender waits for whom, in seconds, and in which order these times must stand.
#
# Each has to outlast the one above it, or the ledger lets go of GPUs that are held; the table of all of them
# is in `tests/unit/extender/test_times.py`.

# Until the API server has answered a Binding. Less than the time between losing and giving up a lease: no
# late write of a former leader.
BIND_SECONDS = 4.0
# After which (settings: assumeSeconds) a choice without an answer may go, with the next sign of life of the
# watch of bound pods: one that is silent would not have shown the pod.
ASSUME_SECONDS = 30.0
# An API server sends a bookmark about once a minute; a watch that brings nothing for SILENCE_SECONDS is
# opened again from where it stood. A binding that was confirmed and is not shown even then gets a new list.
UNSHOWN_SECONDS = SILENCE_SECONDS + 10.0
# A watch that shows no life for so long is dead: pods that others bind would be missing from the ledger.
DEAD_WATCH_SECONDS = 120.0


ENVIRONMENT_PREFIX = "GPU_NODE_EXTENDER_"
RESERVED = frozenset({"CONFIG"})

Port = Annotated[int, Meta(ge=0, le=65535)]
AbsolutePath = Annotated[str, Meta(pattern="^/")]
Name = Annotated[str, Meta(min_length=1)]
Size = Annotated[str, Meta(pattern="^[0-9]{1,4}$")]
Weight = Annotated[float, Meta(ge=0, le=1e6)]


class PlainHttp(Section, frozen=True):
    """Plain HTTP: probes, metrics and, for the API server's service proxy, the scheduler's verbs."""

    address: str = "0.0.0.0"  # noqa: S104  the kubelet probes the pod's address
    port: Port = 3456
    # True: the scheduler's verbs are served here, too, where no caller has to show who it is.
    verbs: bool = False
    # A request with full Node objects may be large; more is refused with 400.
    most_mebibytes: Annotated[int, Meta(ge=1, le=512)] = 64


class Tls(Section, frozen=True):
    """HTTPS with a client certificate, for a kube-scheduler that calls the extender directly."""

    port: Annotated[int, Meta(ge=0, le=65535)] | None = None  # null: not served
    certificate: AbsolutePath = "/etc/gpu-node-agent/tls/tls.crt"
    key: AbsolutePath = "/etc/gpu-node-agent/tls/tls.key"
    # Callers must show a certificate of this authority ...
    client_authority: AbsolutePath = "/etc/gpu-node-agent/tls/ca.crt"
    # ... with one of these common names.
    client_names: Annotated[list[Name], Meta(min_length=1)] = field(
        default_factory=lambda: ["system:kube-scheduler"]
    )
    # Common names that may ask what would fit, and no more: autoscalers.
    simulate_names: list[Name] = field(default_factory=list)


class ApiAccess(Section, frozen=True):
    """Access to the Kubernetes API server."""

    kubeconfig: AbsolutePath | None = None  # null: the pod's service account


class Lease(Section, frozen=True):
    """Which of several replicas serves. Times in seconds, as in other Kubernetes components."""

    name: str = "gpu-node-agent-extender"
    namespace: str | None = None  # null: the pod's own
    identity: str | None = None  # null: the host's name, which is the pod's, and a random part
    duration_seconds: Annotated[int, Meta(ge=3, le=300)] = 15
    renew_seconds: Annotated[float, Meta(ge=1, le=300)] = 10.0  # without a renewal for so long: not leader
    retry_seconds: Annotated[float, Meta(ge=0.1, le=60)] = 2.0


class Serving(Section, frozen=True):
    """How the Service finds the replica that serves: by the label gpu-node-agent.io/extender-serving."""

    pod: Name | None = None  # the own pod; null: no label is written
    selector: str = ""  # labels of all replicas, as the API server takes a label selector


class ExtenderSettings(Section, frozen=True):
    """The whole configuration of the extender."""

    version: Literal[1] = 1
    placement: Literal["binpack", "spread", "fragmentation"] = "fragmentation"
    # Weights of what pods usually ask for, keyed by hundredths of a GPU; what `fragmentation` goes by.
    mix: dict[Size, Weight] = field(default_factory=lambda: {str(size): part for size, part in USUAL.items()})
    # True: replicas of a ReplicaSet or StatefulSet go to nodes and GPUs without others, where there is room.
    spread_replicas: bool = True
    # How long a choice is kept for a pod whose Binding the API server has not confirmed.
    assume_seconds: Annotated[float, Meta(ge=5, le=600)] = ASSUME_SECONDS
    # How long GPUs are kept for a member of a gang between filter and bind.
    gang_seconds: Annotated[float, Meta(ge=5, le=600)] = 60.0
    logging: Logging = Logging()
    http: PlainHttp = PlainHttp()
    tls: Tls = Tls()
    cluster: ApiAccess = ApiAccess()
    lease: Lease = Lease()
    serving: Serving = Serving()


def load(
    file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Sequence[str] = ()
) -> ExtenderSettings:
    """Settings from a YAML file, `GPU_NODE_EXTENDER_*` variables and `key.path=value` flags.

    Blocks on the file. Raises ConfigurationError.
    """
    given = os.environ if environment is None else environment
    variables = {
        name: value for name, value in given.items() if name.removeprefix(ENVIRONMENT_PREFIX) not in RESERVED
    }
    found = configuration.load(ExtenderSettings, file, variables, flags, ENVIRONMENT_PREFIX)
    if found.lease.renew_seconds >= found.lease.duration_seconds:
        fault = (
            f"lease.renewSeconds is {found.lease.renew_seconds:g}, not below lease.durationSeconds "
            f"({found.lease.duration_seconds}): two replicas could serve at once; lower it"
        )
        raise ConfigurationError([fault])
    return found


def schema() -> dict[str, Any]:
    return configuration.schema(ExtenderSettings)
