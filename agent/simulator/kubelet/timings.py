"""The kubelet's waiting times: its constants, which a test may shorten."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, as in kubelet 1.36."""

    status_tick: float = 10.0  # nodeStatusUpdateFrequency
    # A starting kubelet writes its first node status while plugins register; on 1.36.3 those from
    # plugins_registry won that race whenever it was looked at. So they get this long at most.
    first_status: float = 0.5
    # A restarted kubelet serves PodResources before it has heard of any pod: pods from the API server come
    # once the node has been read from there, which is looked at once a second (`config/apiserver.go`).
    first_pods: float = 0.5
    # On 1.36.3 a pod that waits is bound 7 to 27 ms after an end that makes room, and refused, if it is,
    # 19 to 34 ms after it: what the scheduler takes, and what the kubelet's watch and sync loop take.
    scheduling: float = 0.01
    watch: float = 0.01
    registry_poll: float = 1.0  # the plugin manager's reconcile
    registry_retry: float = 0.5  # first pause after a failed registration; doubles
    registry_retry_longest: float = 122.0
    get_info: float = 1.0
    notify: float = 5.0
    dial: float = 10.0
    pre_start: float = 30.0
    container_retry: float = 10.0  # between tries to start a container; the first retry comes at once
    prepare: float = 45.0  # of NodePrepareResources and NodeUnprepareResources
    resync: float = 60.0  # until a pod is looked at again, half of it longer at most: nothing is due sooner
    terminate_retry: float = 10.0  # the same of a pod that could not be ended
    wiping: float = 30.0  # from the end of a DRA driver's connection until its slices are deleted
    health_retry: float = 5.0  # between two tries to follow the health of a driver's devices
    endpoint_grace: float = 300.0  # from the end of a plugin until its resource counts 0
    # Only `endpoint_grace` is measured by this clock, so that five minutes need not pass.
    clock: Callable[[], float] = time.monotonic
