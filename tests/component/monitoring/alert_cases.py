"""Each alert with what makes it fire and what must not: minutes, and values in promtool's notation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.component.monitoring.promtool import Document, Labels, restarted, series

GIB = 1 << 30
G0 = {"node": "n", "gpu": "G0", "index": "0"}
G1 = {"node": "n", "gpu": "G1", "index": "1"}
# The pod of each of two agents, one after the other on one node.
OLD, NEW = {"pod": "agent-1"}, {"pod": "agent-2"}
CORE = "tencent_com_vcuda_core"
Firing = Sequence[tuple[Labels, str]]  # labels, and the value as the text has it


@dataclass(frozen=True)
class Case:
    """Series, and what fires at which minute."""

    series: Sequence[Document]
    firing: Mapping[int, Firing]


def one(*labels: Labels, value: str = "") -> Firing:
    return [(each, value) for each in labels]


def by_gpu(metric: str, values: str, gpu: Labels = G0, **labels: str) -> Document:
    return series(f"gpu_agent_{metric}", values, **gpu, **labels)


def xid(number: str, kind: str) -> Document:
    return series(
        "gpu_agent_gpu_last_xid_timestamp_seconds", "_x5 300x60", **G0, xid=number, **{"class": kind}
    )


def container(pod: str, figure: str, values: str, mode: str = "vgpu") -> Document:
    labels = {**G0, "namespace": "a", "pod": pod, "container": "main", "mode": mode}
    graded = {"attribution": "measured"} if "used" in figure or "utilization" in figure else {}
    return series(f"gpu_agent_container_{figure}", values, **labels, **graded)


def of_container(pod: str, gpu: bool = False) -> Labels:
    labels = {"node": "n", "namespace": "a", "pod": pod, "container": "main"}
    return {**labels, "gpu": "G0"} if gpu else labels


def kube(metric: str, pod: str, values: str, **labels: str) -> Document:
    return series(
        f"kube_pod_container_status_{metric}", values, namespace="a", pod=pod, container="main", **labels
    )


def _mostly_unused() -> Case:
    """Pod p uses an eighth, over an agent's restart; half uses half; idle never ran a kernel."""
    inputs: list[Document] = []
    for pod, used, most in (("p", 1, 0.5), ("half", 4, 0.5), ("idle", 1, 0.0)):
        labels = {**G0, "namespace": "a", "pod": pod, "container": "main", "mode": "vgpu"}
        graded = {**labels, "attribution": "measured"}
        name = "gpu_agent_container_"
        inputs += restarted(f"{name}memory_used_max_bytes", used * GIB, **graded)
        inputs += restarted(f"{name}memory_limit_bytes", 8 * GIB, **labels)
        inputs += restarted(f"{name}utilization_max_ratio", most, **graded)
    return Case(
        inputs, {30: [], 64: one({"node": "n", "namespace": "a", "pod": "p", "mode": "vgpu"}, value="12.5%")}
    )


def _agent_gone() -> Case:
    """Gone for good; deleted with its agent; deleted an hour and more after it; off on purpose; updated."""
    ready, info = "gpu_agent_ready", "kube_node_info"
    off = {"gpu": "G0", "mode": "off", "desired": "off"}
    gone, later = {"node": "gone"}, {"node": "later"}
    return Case(
        [
            *(series(ready, "1x10 stale", node=node, **OLD) for node in ("gone", "deleted", "later", "off")),
            *restarted(ready, 1, OLD, node="updated", **NEW),
            *(series(info, "1x130", node=node) for node in ("gone", "off", "updated")),
            series(info, "1x10 stale", node="deleted"),
            series(info, "1x100 stale", node="later"),
            series("gpu_agent_gpu_mode_info", "1x10 stale", node="off", **off),
        ],
        {14: [], 17: one(gone, later), 90: one(gone, later), 102: one(gone), 125: one(gone)},
    )


def _idle() -> Case:
    """Pod idle holds two GPUs for nothing, over an agent's restart; busy works a bit, share has a share."""
    inputs: list[Document] = []
    for pod, gpu, limit, use in (
        ("idle", "G0", 1, 0.0),
        ("idle", "G1", 1, 0.009),
        ("busy", "G2", 1, 0.02),
        ("share", "G3", 0.5, 0.0),
    ):
        labels = {"node": "n", "gpu": gpu, "index": gpu[1:]}
        box = {**labels, "namespace": "a", "pod": pod, "container": "main", "mode": "pgpu"}
        for name, value, of in (
            ("container_core_limit_ratio", limit, box),
            ("gpu_utilization_mean_ratio", use, labels),
        ):
            inputs.append(series(f"gpu_agent_{name}", f"{value}x200 stale", **of, instance="1"))
            inputs.append(series(f"gpu_agent_{name}", f"_x203 {value}x300", **of, instance="2"))
    return Case(inputs, {350: [], 365: one({"node": "n", "namespace": "a", "pod": "idle"}, value="2")})


def not_asked(room: str, asked: str, errors: str = "", scheduled: str = "") -> Sequence[Document]:
    """Pod p waits for 80 cores of `room`; the extender is well, and was asked so often.

    `errors`, `scheduled`: attempts of kube-scheduler that ended so; both empty: it is not scraped.
    """
    attempts = [
        series("scheduler_schedule_attempts_total", values, result=result, profile="default")
        for result, values in (("error", errors), ("scheduled", scheduled))
        if values
    ]
    pod = {"namespace": "a", "pod": "p"}
    return [
        series("kube_pod_container_resource_requests", "80x90", **pod, container="c", resource=CORE),
        series("kube_pod_status_phase", "1x90", **pod, phase="Pending"),
        series("kube_pod_status_scheduled", "1x60 0x30", **pod, condition="false"),
        series("kube_node_status_allocatable", room, node="n", resource=CORE),
        series("gpu_agent_extender_ready", "1x90"),
        series("gpu_agent_extender_requests_total", asked, verb="filter", result="ok"),
        *attempts,
    ]


CASES: dict[str, Case] = {
    "GPUUnhealthy": Case(
        [*restarted("gpu_agent_gpu_healthy", 0, OLD, **G0, **NEW), by_gpu("gpu_healthy", "1x60", G1)],
        {0: [], 9: one(G0), 14: one(G0), 50: one(G0)},
    ),
    "GPUXid": Case(
        [
            xid("79", "hardware"),
            by_gpu("gpu_last_xid_timestamp_seconds", "_x5 300x60", G1, xid="48"),  # of an older agent
            xid("31", "application"),
            xid("63", "informational"),
        ],
        {4: [], 6: one({**G0, "xid": "79"}, {**G1, "xid": "48"}), 16: []},
    ),
    "GPUApplicationXid": Case(
        [
            xid("31", "application"),
            xid("79", "hardware"),
        ],
        {4: [], 6: one({**G0, "xid": "31"}), 16: []},
    ),
    "GPUIdle": _idle(),
    "GPUUncorrectableMemoryErrors": Case(
        [
            by_gpu("gpu_ecc_errors_total", "0x5 1x60", type="uncorrected"),
            by_gpu("gpu_ecc_errors_total", "0x5 9x60", {**G0, "gpu": "G7"}, type="corrected"),
            by_gpu("gpu_ecc_uncorrected_events_total", "0x5 1x60", G1),
        ],
        {5: [], 7: one(G0, G1), 30: []},
    ),
    "GPUThermalSlowdown": Case(
        [
            by_gpu("gpu_throttled", "0x5 1x30 0x9", reason="sw_thermal"),
            by_gpu("gpu_throttled", "1x60", G1, reason="sw_power_cap"),
        ],
        {9: [], 12: one(G0), 40: []},
    ),
    "GPUPowerBrake": Case(
        [by_gpu("gpu_throttled", "0x5 1x30 0x9", reason="hw_power_brake")], {9: [], 12: one(G0), 40: []}
    ),
    # While it lasts, and for a quarter of an hour after one that was over between two scrapes.
    "MPSFault": Case(
        [
            series("gpu_agent_mps_daemon_state", "0x9 1x3 0x100", node="n", gpu="G0", state="fault"),
            series("gpu_agent_mps_faults_total", "0x9 1x60 2x60", node="n", gpu="G0"),
        ],
        {minute: one({"node": "n", "gpu": "G0"}) for minute in (11, 20, 74)} | {8: [], 40: []},
    ),
    "MPSDaemonDown": Case(
        [
            series("gpu_agent_mps_daemon_state", "0x5 1x20 0x9", node="n", gpu="G0", state="stopped"),
            series("gpu_agent_mps_daemon_state", "1x40", node="n", gpu="G1", state="active"),
        ],
        {7: [], 9: one({"node": "n", "gpu": "G0", "state": "stopped"}), 30: []},
    ),
    # kube-state-metrics restarts. Node b switched for a while, node c has somebody else's taint.
    "GPUSchedulingHeld": Case(
        [
            *restarted("kube_node_spec_taint", 1, node="a", key="gpu-node-agent.io/switching"),
            series("kube_node_spec_taint", "1x8 stale", node="b", key="gpu-node-agent.io/switching"),
            series("kube_node_spec_taint", "1x60", node="c", key="other"),
        ],
        {9: [], 40: one({"node": "a"})},
    ),
    "GPUModeSwitchBlocked": Case(
        [series("gpu_agent_mode_state", "0x5 1x30 0x9", node="n", state="blocked")],
        {14: [], 17: one({"node": "n", "state": "blocked"}), 40: []},
    ),
    "GPUMemoryMostlyUnused": _mostly_unused(),
    "GPUAllocationRefused": Case(
        [
            series(
                "gpu_agent_kubelet_calls_total",
                values,
                node="n",
                resource="nvidia.com/gpu",
                call="Allocate",
                result=result,
            )
            for result, values in (("ok", "0+1x60"), ("invalid_argument", "0x5 1x60"))
        ]
        + [
            series("gpu_agent_dra_prepares_total", values, node="n", outcome=outcome)
            for outcome, values in (("prepared", "0+1x60"), ("refused", "0x39 1x60"))
        ],
        {
            5: [],
            7: one({"node": "n", "resource": "nvidia.com/gpu"}),
            30: [],
            42: one({"node": "n", "resource": "claims"}),
        },
    ),
    "GPUAgentNotReady": Case(
        [series("gpu_agent_ready", "1x5 0x20 1x9", node="n", **OLD)], {9: [], 12: one({"node": "n"}), 30: []}
    ),
    "GPUFiguresMissing": Case(
        [by_gpu("gpu_sample_failures_total", "0x5 1+1x20 21x20")], {8: [], 14: one(G0), 40: []}
    ),
    "GPUAgentGone": _agent_gone(),
    "GPUMemoryNearLimit": Case(
        [
            container("p", "memory_used_max_bytes", f"{GIB}x5 {int(3.88 * GIB)}x20 {GIB}x9"),
            container("p", "memory_limit_bytes", f"{4 * GIB}x60"),
            container("whole", "memory_used_max_bytes", f"{80 * GIB}x60", "pgpu"),
            container("whole", "memory_limit_bytes", f"{80 * GIB}x60", "pgpu"),
        ],
        {14: [], 17: one(of_container("p", gpu=True), value="97%"), 30: []},
    ),
    # Pod p restarts, job ends for good, small and neighbour restart with memory left; full does not restart.
    "GPUOutOfMemory": Case(
        [
            *(
                container(pod, figure, f"{size * GIB}x90")
                for pod, used in (("p", 4), ("job", 4), ("small", 1), ("full", 4))
                for figure, size in (("memory_used_max_bytes", used), ("memory_limit_bytes", 4))
            ),
            kube("restarts_total", "p", "0x20 1x70"),
            kube("restarts_total", "small", "0x20 1x70"),
            kube("restarts_total", "full", "3x90"),
            kube("terminated_reason", "job", "0x20 1x5 0x60", reason="Error"),
            kube("terminated_reason", "full", "1x90", reason="Completed"),
        ],
        {19: [], 22: one(of_container("p"), of_container("job"), value="100%"), 60: []},
    ),
    "GPUContainerOOMKilled": Case(
        [
            *(container(pod, "memory_limit_bytes", "3x90") for pod in ("p", "job", "other")),
            kube("restarts_total", "p", "0x20 1x70"),
            kube("last_terminated_reason", "p", "_x21 1x70", reason="OOMKilled"),
            kube("terminated_reason", "job", "0x20 1x5 0x60", reason="OOMKilled"),
            kube("restarts_total", "other", "0x20 1x70"),
            kube("last_terminated_reason", "other", "_x21 1x70", reason="Error"),
            kube("terminated_reason", "no-gpu", "1x90", reason="OOMKilled"),
        ],
        {19: [], 22: one(of_container("p"), of_container("job")), 60: []},
    ),
    "GPUAllocConflict": Case(
        [
            series(
                "paddle_gpu_malloc_failed_total", "0x5 1+1x10 11x60", namespace="a", pod="p", instance="1"
            ),
            series("paddle_gpu_malloc_failed_total", "7x60", namespace="a", pod="before", instance="2"),
        ],
        {5: [], 8: one({"namespace": "a", "pod": "p"}), 40: []},
    ),
    "GPUQuotaNearlyUsed": Case(
        [
            series(
                "kube_resourcequota",
                values,
                namespace="a",
                resourcequota="q",
                resource="requests.nvidia.com/mps-core",
                type=kind,
            )
            for kind, values in (("hard", "200x60"), ("used", "100x5 190x20 100x20"))
        ],
        {14: [], 17: one({"namespace": "a", "resource": "nvidia_com_mps_core"}, value="95%"), 30: []},
    ),
    "GPUDemandUnsatisfied": Case(
        [
            series(
                "kube_pod_container_resource_requests",
                "80x90",
                namespace="a",
                pod="p",
                container="c",
                resource=CORE,
            ),
            series("kube_pod_status_phase", "1x90", namespace="a", pod="p", phase="Pending"),
            series("kube_pod_status_scheduled", "1x60 0x30", namespace="a", pod="p", condition="false"),
        ],
        {29: [], 32: one({"resource": CORE}, value="80"), 65: []},
    ),
    # The leader ends, its successor takes over after three minutes.
    "GPUExtenderNotServing": Case(
        [
            series("gpu_agent_extender_ready", "1x10 stale", pod="x"),
            series("gpu_agent_extender_ready", "0x13 1x30 0x20", pod="y"),
        ],
        {9: [], 13: one({}), 20: [], 50: one({})},
    ),
    "GPUExtenderErrors": Case(
        [
            series("gpu_agent_extender_responses_total", values, pod="x", verb="bind", code=code)
            for code, values in (("200", "0+9x60"), ("503", "0x5 1+1x20 21x30"))
        ],
        {8: [], 14: one({"verb": "bind", "code": "503"}), 40: []},
    ),
    # In the end the pod is bound.
    "GPUExtenderNotAsked": Case(
        not_asked("800x90", "100x90"), {8: [], 20: one({}, value="1"), 59: one({}, value="1"), 65: []}
    ),
    "GPUExtenderWatchStale": Case(
        [
            series("gpu_agent_extender_watch_age_seconds", "30x5 60 120 180 240x20 0x9", resource="nodes"),
            series("gpu_agent_extender_watch_age_seconds", "60x60", resource="pods"),
        ],
        {6: [], 13: one({"resource": "nodes"}, value="4m 0s"), 34: []},
    ),
    "GPUExtenderRefusals": Case(
        [
            series("gpu_agent_extender_requests_total", values, verb="bind", result=result)
            for result, values in (("ok", "0+9x60"), ("refused", "0x5 10x20 12x60"))
        ],
        {5: [], 16: one({"verb": "bind"}, value="10"), 40: []},
    ),
}
