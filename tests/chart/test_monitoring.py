"""Objects of the chart for Prometheus, Grafana and the platform: the files as they are, labelled."""

import json
from pathlib import Path

import pytest
import yaml

from agent import settings
from tests.chart import helm
from tests.chart.helm import Manifest

FILES = helm.CHART / "files"
BOARDS = {
    "gpu-capacity": "GPU / Capacity and Quota",
    "gpu-fleet": "GPU / Fleet",
    "gpu-node-monitoring": "GPU / Node Monitoring",
    "gpu-pod-monitoring": "GPU / Pod Monitoring",
}
# Rules that come with an option, for names that other programs ask for.
NAMES = {"dcgm-names": "metrics.rules.dcgmNames", "opencost": "metrics.rules.openCost"}


@pytest.fixture
def platform() -> tuple[Manifest, ...]:
    return tuple(helm.template(helm.CHART / "ci" / "platform-values.yaml"))


def kind(objects: tuple[Manifest, ...], name: str) -> list[Manifest]:
    return [each for each in objects if each["kind"] == name]


def test_rules_come_as_they_are(platform: tuple[Manifest, ...]) -> None:
    rules = kind(platform, "PrometheusRule")
    assert {json.dumps(each["spec"]) for each in rules} == {
        json.dumps(yaml.safe_load(path.read_text()))
        for path in (FILES / "rules").glob("*.yaml")
        if path.stem not in ("extender", *NAMES)
    }
    assert all(each["metadata"]["labels"]["prometheus"] == "kube-prometheus" for each in rules)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_others_come_by_option(name: str) -> None:
    made = helm.template(settings=("metrics.rules.enabled=true", f"{NAMES[name]}=true"))
    found = {each["metadata"]["name"] for each in kind(tuple(made), "PrometheusRule")}
    assert {other for other in NAMES if any(each.endswith(other) for each in found)} == {name}


def test_rules_of_the_extender_come_with_the_extender() -> None:
    """No extender is a fault only where there should be one."""
    found = {
        on: [
            rule.get("alert")
            for each in kind(
                tuple(
                    helm.template(
                        settings=(
                            "metrics.rules.enabled=true",
                            f"extender.enabled={on}",
                            "extender.config.http.verbs=true",
                        )
                    )
                ),
                "PrometheusRule",
            )
            for group in each["spec"]["groups"]
            for rule in group["rules"]
        ]
        for on in ("true", "false")
    }
    assert "GPUExtenderNotServing" in found["true"]
    assert "GPUExtenderNotServing" not in found["false"]
    assert "GPUAgentGone" in found["false"]


def test_labels_that_a_prometheus_selects_by_are_set_in_one_place() -> None:
    """kube-prometheus-stack selects monitors and rules by `release`: the name of its own release."""
    for way in ("podMonitor", "serviceMonitor"):
        objects = tuple(
            helm.template(
                settings=(
                    'metrics.labels.release="monitoring"',
                    f"metrics.{way}.enabled=true",
                    "metrics.rules.enabled=true",
                    "extender.enabled=true",
                    "extender.config.http.verbs=true",
                )
            )
        )
        selected = [*kind(objects, f"{way[0].upper()}{way[1:]}"), *kind(objects, "PrometheusRule")]
        assert len(selected) == 2 + len(list((FILES / "rules").glob("*.yaml"))) - len(NAMES)
        for each in selected:
            assert (
                each["metadata"]["labels"].items()
                >= {
                    "release": "monitoring",
                    "prometheus": "kube-prometheus",
                }.items()
            )
            assert each["metadata"]["labels"]["app.kubernetes.io/name"] == "gpu-node-agent"


def test_each_alert_has_a_page_to_turn_to() -> None:
    headings = (helm.CHART.parents[1] / "docs" / "runbooks.md").read_text().lower().splitlines()
    on = ("metrics.rules.enabled=true", "extender.enabled=true", "extender.config.http.verbs=true")
    prefix = "https://git.example.org/gpu/blob/main/"
    objects = tuple(helm.template(settings=(*on, f'metrics.rules.runbookPrefix="{prefix}"')))
    alerts = [
        rule
        for each in kind(objects, "PrometheusRule")
        for group in each["spec"]["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(alerts) > 20
    for rule in alerts:
        assert rule["annotations"]["runbook_url"] == f"{prefix}docs/runbooks.md#{rule['alert'].lower()}"
        assert f"## {rule['alert'].lower()}" in headings, f"docs/runbooks.md says nothing of {rule['alert']}"


def test_dashboards_come_as_configmaps_and_as_objects_of_the_platform(platform: tuple[Manifest, ...]) -> None:
    boards = {path.stem: json.loads(path.read_text()) for path in (FILES / "dashboards").glob("*.json")}
    assert {name: board["title"] for name, board in boards.items()} == BOARDS
    maps = [each for each in kind(platform, "ConfigMap") if "grafana_dashboard" in each["metadata"]["labels"]]
    found = {name: json.loads(text) for each in maps for name, text in each["data"].items()}
    assert found == {f"{name}.json": board for name, board in boards.items()}
    objects = kind(platform, "MonitorDashboard")
    assert {each["spec"]["body"]["title"] for each in objects} == set(BOARDS.values())
    for each in objects:
        assert each["metadata"]["labels"]["cpaas.io/dashboard.folder"] == "GPU"
        assert each["metadata"]["labels"]["cpaas.io/published"] == "true"
        board = next(board for board in boards.values() if board["title"] == each["spec"]["body"]["title"])
        assert each["spec"]["body"]["panels"] == board["panels"]


@pytest.mark.parametrize("path", sorted((FILES / "dashboards").glob("*.json")), ids=lambda path: path.stem)
def test_dashboards_offer_the_times_and_stay_on_the_grid(path: Path) -> None:
    board = json.loads(path.read_text())
    ranges = [each["from"] for each in board["timepicker"]["quick_ranges"]]
    assert ranges[:7] == ["now-30m", "now-1h", "now-6h", "now-12h", "now-24h", "now-2d", "now-7d"]
    assert board["refresh"]
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells


@pytest.mark.parametrize("way", ["podMonitor", "serviceMonitor"])
def test_each_part_is_scraped_by_one_monitor_and_once(way: str) -> None:
    on = (
        "extender.enabled=true",
        "extender.config.http.verbs=true",
        "extender.productServices=true",
        f"metrics.{way}.enabled=true",
    )
    objects = tuple(helm.template(settings=on))
    targets = {
        "podMonitor": [
            each["spec"]["template"]["metadata"]["labels"]
            for each in (*kind(objects, "DaemonSet"), *kind(objects, "Deployment"), *kind(objects, "Job"))
        ],
        "serviceMonitor": [each["metadata"]["labels"] for each in kind(objects, "Service")],
    }[way]
    monitors = kind(objects, f"{way[0].upper()}{way[1:]}")
    wanted = [each["spec"]["selector"]["matchLabels"] for each in monitors]
    taken = [[labels for labels in targets if match.items() <= labels.items()] for match in wanted]
    parts = [labels["app.kubernetes.io/component"] for found in taken for labels in found]
    assert sorted(parts) == ["agent", "extender"]
    assert len({each["metadata"]["name"] for each in monitors}) == 2


ACCESS = ('metrics.access.secret="pki"', 'metrics.access.readers=["monitoring:prometheus-k8s"]')


@pytest.mark.parametrize("way", ["podMonitor", "serviceMonitor"])
def test_metrics_behind_a_right_are_scraped_with_a_token_over_https(way: str) -> None:
    objects = tuple(helm.template(settings=(*ACCESS, f"metrics.{way}.enabled=true")))
    (monitor,) = kind(objects, f"{way[0].upper()}{way[1:]}")
    spec = monitor["spec"]
    (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
    assert (endpoint["port"], endpoint["scheme"]) == ("https", "https")
    assert endpoint["tlsConfig"] == {
        "serverName": f"test-gpu-node-agent.{helm.NAMESPACE}.svc",
        "ca": {"secret": {"name": "pki", "key": "ca.crt"}},
    }
    # The token is one of an account that may do this and nothing else.
    named = endpoint["authorization"]["credentials"]["name"]
    (secret,) = kind(objects, "Secret")
    assert secret["metadata"]["name"] == named
    account = secret["metadata"]["annotations"]["kubernetes.io/service-account.name"]
    role = helm.one(objects, "ClusterRole", "-metrics")
    assert role["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    bindings = [each for each in objects if each["kind"] in ("RoleBinding", "ClusterRoleBinding")]
    held = [
        (each["roleRef"]["name"], subject["namespace"], subject["name"])
        for each in bindings
        for subject in each["subjects"]
        if subject["name"] in (account, "prometheus-k8s")
    ]
    name = role["metadata"]["name"]
    assert held == [(name, helm.NAMESPACE, account), (name, "monitoring", "prometheus-k8s")]


def test_the_agent_serves_what_the_monitor_asks_and_may_ask_who_that_is(tmp_path: Path) -> None:
    objects = helm.template(settings=(*ACCESS, "networkPolicy.enabled=true", "metrics.access.port=9500"))
    pod = helm.one(objects, "DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = next(each["data"]["config.yaml"] for each in objects if "config.yaml" in each.get("data", {}))
    (tmp_path / "c.yaml").write_text(config)
    https = settings.load(tmp_path / "c.yaml", {}, ()).https
    assert {"name": "https", "containerPort": https.port, "protocol": "TCP"} in container["ports"]
    (folder,) = (each["mountPath"] for each in container["volumeMounts"] if each["name"] == "tls")
    assert {str(Path(path).parent) for path in (https.certificate, https.key)} == {folder}
    (volume,) = (each["secret"] for each in pod["volumes"] if each["name"] == "tls")
    assert volume["secretName"] == "pki"
    role = helm.one(objects, "ClusterRole", "gpu-node-agent")
    asks = [rule for rule in role["rules"] if rule["apiGroups"][0].startswith("auth")]
    assert asks == [
        {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
        {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]},
    ]
    policy = helm.one(objects, "NetworkPolicy")
    assert [each["port"] for each in policy["spec"]["ingress"][0]["ports"]] == [9500]
    assert not kind(tuple(objects), "Secret")  # no monitor, no account of ours


@pytest.mark.parametrize("path", sorted((FILES / "dashboards").glob("*.json")), ids=lambda path: path.stem)
def test_boards_keep_clusters_apart_and_begin_small(path: Path) -> None:
    """All nodes of a large cluster, or all pods, are thousands of lines."""
    board = json.loads(path.read_text())
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["cluster"]["allValue"] == ".*"  # also of series without that label
    first = {"gpu-node-monitoring": "node", "gpu-pod-monitoring": "namespace"}.get(path.stem)
    assert first is None or not variables[first]["includeAll"]
    for panel in board["panels"]:
        for target in panel["targets"]:
            assert 'cluster=~"$cluster"' in target["expr"], panel["title"]
            merged = [each["id"] for each in panel.get("transformations", [])]
            assert len(panel["targets"]) == 1 or panel["type"] != "table" or merged[0] == "merge"
