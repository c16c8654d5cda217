"""promtool runs every alert of the chart: when it fires, with which labels and words, when it is quiet."""

import re
from pathlib import Path

import pytest
import yaml

from tests.component.monitoring import queries
from tests.component.monitoring.alert_cases import CASES, CORE, G0, G1, container, not_asked
from tests.component.monitoring.promtool import ORDER, check, fires, promtool, rule_of, series


@pytest.mark.parametrize("path", queries.RULES, ids=lambda path: path.stem)
def test_promtool_accepts_the_rules(path: Path) -> None:
    code, answer = promtool("check", "rules", "--lint=all", "--lint-fatal", str(path))
    assert code == 0, answer


def test_every_alert_says_what_and_where() -> None:
    for alert in queries.named("alert"):
        rule = rule_of(alert)
        assert rule["labels"]["severity"] in {"Critical", "High", "Medium", "Low"}
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook_url"}
        assert notes["runbook_url"] == f"docs/runbooks.md#{alert.lower()}"
        # There is one extender, and no replica that serves has a name.
        where = (
            "scheduler extender"
            if alert.startswith("GPUExtender")
            else r"\$labels\.(node|namespace|resource)"
        )
        assert re.search(where, notes["summary"] + notes["description"])


def test_every_alert_is_shown_to_fire_and_to_be_quiet() -> None:
    assert set(CASES) == set(queries.named("alert"))
    for alert, case in CASES.items():
        quiet = [minute for minute, firing in case.firing.items() if not firing]
        assert quiet, f"{alert} is never quiet"
        assert len(quiet) < len(case.firing), f"{alert} never fires"


@pytest.mark.parametrize("alert", sorted(CASES))
def test_alert(alert: str, tmp_path: Path) -> None:
    case = CASES[alert]
    tests = [fires(minute, alert, firing) for minute, firing in case.firing.items()]
    check(tmp_path, {"input_series": list(case.series), "alert_rule_test": tests}, needed(alert))


def needed(alert: str) -> list[Path]:
    """The rule files that an alert takes part in: promtool's time goes by the number of rules."""
    recorded = ":" in rule_of(alert)["expr"]
    files = [path for path in queries.RULES if recorded and path.stem in ("recording", "capacity")]
    return [*files, *(path for path in queries.RULES if f"alert: {alert}\n" in path.read_text())]


def test_no_scrape_of_an_extender_at_all_is_no_replica_that_serves(tmp_path: Path) -> None:
    alert = "GPUExtenderNotServing"
    check(tmp_path, {"input_series": [], "alert_rule_test": [fires(1, alert), fires(5, alert, [({}, "")])]})


def test_without_kube_state_metrics_an_agent_that_is_gone_is_reported_for_an_hour(tmp_path: Path) -> None:
    inputs = [series("gpu_agent_ready", "1x10 stale", node="n")]
    tests = [
        fires(14, "GPUAgentGone"),
        fires(17, "GPUAgentGone", [({"node": "n"}, "")]),
        fires(65, "GPUAgentGone", [({"node": "n"}, "")]),
        fires(90, "GPUAgentGone"),
    ]
    check(tmp_path, {"input_series": inputs, "alert_rule_test": tests})


def test_a_restart_of_kube_state_metrics_hides_no_agent_that_is_gone(tmp_path: Path) -> None:
    inputs = [
        series("gpu_agent_ready", "1x10 stale", node="n"),
        series("kube_node_info", "1x100 stale", node="n", instance="1"),
        series("kube_node_info", "_x105 1x100", node="n", instance="2"),
    ]
    firing = [({"node": "n"}, "")]
    tests = [fires(minute, "GPUAgentGone", firing) for minute in (99, 102, 107, 190)]
    check(tmp_path, {"input_series": inputs, "alert_rule_test": tests})


def test_the_names_of_the_groups_are_what_the_tests_order_them_by() -> None:
    groups = {group["name"] for path in queries.RULES for group in yaml.safe_load(path.read_text())["groups"]}
    assert groups == set(ORDER)


@pytest.mark.parametrize(
    ("room", "asked", "errors", "scheduled"),
    [
        ("79x90", "100x90", "", ""),
        ("800x90", "0+1x90", "", ""),
        ("800x90", "100x90", "7x90", ""),
        ("800x90", "100x90", "", "7x90"),
    ],
    ids=["no room", "it is asked", "no node suits for other reasons", "never an error"],
)
def test_pods_that_wait_for_room_or_are_asked_about_are_no_fault_of_the_way_to_the_extender(
    tmp_path: Path, room: str, asked: str, errors: str, scheduled: str
) -> None:
    alert = "GPUExtenderNotAsked"
    tests = [fires(minute, alert) for minute in (15, 30, 59)]
    inputs = list(not_asked(room, asked, errors, scheduled))
    check(tmp_path, {"input_series": inputs, "alert_rule_test": tests}, needed(alert))


@pytest.mark.parametrize("errors", ["", "0+1x90"], ids=["kube-scheduler not scraped", "its errors"])
def test_unreachable_extender_raises_an_alert(tmp_path: Path, errors: str) -> None:
    """As the old rules saw it, too: that pods wait came to light after half an hour, and blamed the nodes."""
    firing = [fires(20, "GPUExtenderNotAsked", [({}, "1")]), fires(20, "GPUDemandUnsatisfied")]
    check(tmp_path, {"input_series": list(not_asked("800x90", "100x90", errors)), "alert_rule_test": firing})


def test_idle_gpus_raise_an_alert(tmp_path: Path) -> None:
    inputs = []
    for number in range(8):
        gpu = {"node": "n", "gpu": f"G{number}", "index": str(number)}
        box = {**gpu, "namespace": "a", "pod": "idle", "container": "main", "mode": "pgpu"}
        inputs += [
            series("gpu_agent_gpu_utilization_mean_ratio", "0x370", **gpu),
            series("gpu_agent_container_core_limit_ratio", "1x370", **box),
        ]
    firing = [({"node": "n", "namespace": "a", "pod": "idle"}, "8")]
    tests = [fires(355, "GPUIdle"), fires(365, "GPUIdle", firing)]
    check(tmp_path, {"input_series": inputs, "alert_rule_test": tests}, needed("GPUIdle"))


def test_estimates_feed_nothing(tmp_path: Path) -> None:
    """A container that ends badly at its limit, by an estimate: it may be its neighbour's memory."""
    share = {**G1, "namespace": "a", "pod": "guess", "container": "main", "mode": "vgpu"}
    guess = {**share, "attribution": "estimated"}
    inputs = [
        series("gpu_agent_container_memory_limit_bytes", "100x90", **share),
        series("gpu_agent_container_core_limit_ratio", "0.5x90", **share),
        series("gpu_agent_container_held_ratio", "0.5x90", **share),
        series("gpu_agent_container_memory_used_bytes", "99x90", **guess),
        series("gpu_agent_container_memory_used_max_bytes", "99x90", **guess),
        series("gpu_agent_container_utilization_ratio", "0.5x90", **guess),
        series("gpu_agent_container_utilization_mean_ratio", "0.5x90", **guess),
        series("gpu_agent_container_utilization_max_ratio", "0.5x90", **guess),
        series(
            "kube_pod_container_status_restarts_total",
            "0x20 1x70",
            namespace="a",
            pod="guess",
            container="main",
        ),
    ]
    inputs.append(series("gpu_agent_extender_ready", "1x90"))
    # What is held is billed all the same; nobody says that it is idle.
    fed = '{__name__=~"(pod|node|cluster|namespace).*:.*(_used|_idle|utilization|_measured).*"}'
    quiet = [{"expr": expr, "eval_time": "30m", "exp_samples": []} for expr in (fed, "ALERTS")]
    check(tmp_path, {"input_series": inputs, "promql_expr_test": quiet})


def test_quiet_week_raises_nothing(tmp_path: Path) -> None:
    """Idle nights, a gated pod, an estimate at its limit, a notice of the driver, an agent that restarts."""
    day = "0x299 0.8x1139"
    week = " ".join([day] * 7)
    always = "x10079"
    gated = {"namespace": "a", "pod": "gated"}
    share = {**G1, "namespace": "a", "pod": "guess", "container": "main", "mode": "vgpu"}
    inputs = [
        series("gpu_agent_gpu_utilization_mean_ratio", week, **G0),
        series("gpu_agent_gpu_utilization_max_ratio", week, **G0),
        container("works", "core_limit_ratio", f"1{always}", "pgpu"),
        series("gpu_agent_gpu_healthy", f"1{always}", **G0),
        series("gpu_agent_ready", "1x5000 stale", node="n", instance="1"),
        series("gpu_agent_ready", "_x5003 1x5076", node="n", instance="2"),
        series("kube_node_info", f"1{always}", node="n"),
        series(
            "gpu_agent_gpu_last_xid_timestamp_seconds",
            "_x100 6000x9979",
            **G0,
            xid="63",
            **{"class": "informational"},
        ),
        series("gpu_agent_container_memory_used_max_bytes", f"99{always}", **share, attribution="estimated"),
        series("gpu_agent_container_memory_limit_bytes", f"100{always}", **share),
        series("kube_pod_container_resource_requests", f"4{always}", **gated, container="c", resource=CORE),
        series("kube_node_status_allocatable", f"800{always}", node="n", resource=CORE),
        series("kube_pod_status_phase", f"1{always}", **gated, phase="Pending"),
        series("kube_pod_status_scheduled", f"1{always}", **gated, condition="false"),
        series("kube_pod_status_unschedulable", f"1{always}", **gated),
        series("scheduler_pending_pods", f"1{always}", queue="gated"),
        series("gpu_agent_extender_ready", f"1{always}"),
        series("gpu_agent_extender_requests_total", f"7{always}", verb="filter", result="ok"),
    ]
    fired = {
        "expr": 'count_over_time(ALERTS{alertstate="firing"}[7d])',
        "eval_time": "10079m",
        "exp_samples": [],
    }
    check(tmp_path, {"input_series": inputs, "promql_expr_test": [fired]}, every="30m")
