"""promtool runs every alert of the chart: when it fires, with which labels and words, when it is quiet."""

import re
from pathlib import Path

import pytest
import yaml

from tests.component.monitoring import queries
from tests.component.monitoring.alert_cases import CASES
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
