"""The extender's part of the chart: what it may do, who may come, and a configuration that it accepts."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from agent.extender import settings
from agent.extender.lease import LABEL
from agent.extender.metrics import PREFIX, ExtenderMetrics, LedgerFigures
from tests.chart import helm
from tests.chart.helm import Manifest

PLAIN = "extender.config.http.verbs=true"
ON = ("extender.enabled=true", PLAIN, "networkPolicy.enabled=true", "extender.productServices=true")
CONFIG = Path(__file__).parents[2] / "config" / "scheduler"


def made(*more: str) -> list[Manifest]:
    return helm.template(settings=(*ON, *more))


def pod(objects: list[Manifest]) -> dict[str, Any]:
    spec: dict[str, Any] = helm.one(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


def test_it_is_off_by_default() -> None:
    assert not [each for each in helm.template() if "extender" in each["metadata"]["name"]]


@pytest.mark.parametrize("minor", ["1.30", "1.36"])
def test_kubernetes_knows_every_field(minor: str) -> None:
    for each in made('extender.tls.secret="certificates"'):
        kubernetes_validate.validate(each, minor, strict=True)


@pytest.mark.parametrize("secret", ["", "certificates"])
def test_it_accepts_its_configuration_and_serves_the_ports_named(secret: str, tmp_path: Path) -> None:
    objects = made(f'extender.tls.secret="{secret}"', 'extender.config.placement="spread"')
    config = next(each for each in objects if "extender.yaml" in each.get("data", {}))
    (tmp_path / "c.yaml").write_text(config["data"]["extender.yaml"])
    found = settings.load(tmp_path / "c.yaml", {})
    assert found.placement == "spread"
    assert found.http.verbs  # for the Services under the former names
    (container,) = pod(objects)["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"http": found.http.port} | ({"https": found.tls.port} if secret else {})
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    assert not secret or str(Path(found.tls.certificate).parent) in mounts
    service = helm.one(objects, "Service", "-extender")
    assert {one["port"] for one in service["spec"]["ports"]} == set(ports.values())


def test_the_scheduler_s_certificate_alone_may_call_unless_others_are_named(tmp_path: Path) -> None:
    def names(*more: str) -> list[str]:
        objects = made('extender.tls.secret="pki"', *more)
        config = next(each for each in objects if "extender.yaml" in each.get("data", {}))
        (tmp_path / "c.yaml").write_text(config["data"]["extender.yaml"])
        return settings.load(tmp_path / "c.yaml", {}).tls.client_names

    assert names() == ["system:kube-scheduler"]
    assert names('extender.tls.clientNames=["second-scheduler"]') == ["second-scheduler"]


def test_plain_http_has_verbs_only_where_the_values_say_so() -> None:
    def verbs(*settings: str) -> bool:
        objects = helm.template(settings=("extender.enabled=true", *settings))
        config = next(each for each in objects if "extender.yaml" in each.get("data", {}))
        found: bool = yaml.safe_load(config["data"]["extender.yaml"])["http"]["verbs"]
        return found

    assert verbs(PLAIN)
    assert not verbs('extender.tls.secret="pki"')
    assert verbs('extender.tls.secret="pki"', PLAIN)


def test_its_lease_goes_with_the_release() -> None:
    objects = made()
    lease = helm.one(objects, "Lease")
    config = next(each for each in objects if "extender.yaml" in each.get("data", {}))
    assert lease["metadata"]["name"] == yaml.safe_load(config["data"]["extender.yaml"])["lease"]["name"]
    assert "spec" not in lease, "the leader writes it"


def test_every_replica_is_ready_and_the_services_find_the_one_that_serves(tmp_path: Path) -> None:
    objects = made()
    spec = helm.one(objects, "Deployment")["spec"]
    assert "progressDeadlineSeconds" not in spec
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    labels = spec["template"]["metadata"]["labels"]
    assert LABEL not in labels
    budget = helm.one(objects, "PodDisruptionBudget")["spec"]
    assert budget == {"maxUnavailable": 1, "selector": spec["selector"]}
    services = [each for each in objects if each["kind"] == "Service" and "selector" in each["spec"]]
    serving = [each["spec"]["selector"] for each in services if LABEL in each["spec"]["selector"]]
    assert serving == [spec["selector"]["matchLabels"] | {LABEL: "true"}] * 3
    config = next(each for each in objects if "extender.yaml" in each.get("data", {}))
    (tmp_path / "c.yaml").write_text(config["data"]["extender.yaml"])
    wanted = dict(
        part.split("=") for part in settings.load(tmp_path / "c.yaml", {}).serving.selector.split(",")
    )
    assert wanted == spec["selector"]["matchLabels"]


def test_it_may_do_what_it_does_and_no_more() -> None:
    objects = made()
    rules = (
        helm.one(objects, "ClusterRole", "-extender")["rules"]
        + helm.one(objects, "Role", "-extender")["rules"]
    )
    allowed = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert allowed == {
        *(("nodes", verb) for verb in ("list", "watch")),
        *(("pods", verb) for verb in ("get", "list", "watch")),
        ("pods/binding", "create"),
        ("events", "create"),  # about pods, in its own name, by an admission policy
        *(("leases", verb) for verb in ("create", "get", "patch")),
        *(("configmaps", verb) for verb in ("get", "patch")),  # one, with what is kept for gangs
        ("pods", "patch"),  # one label of its own replicas, by an admission policy
    }
    (container,) = pod(objects)["containers"]
    security = container["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_it_may_write_choices_although_the_policy_keeps_others_out() -> None:
    policy = helm.one(made(), "ValidatingAdmissionPolicy", "-choices")
    (condition,) = policy["spec"]["matchConditions"]
    assert f"system:serviceaccount:{helm.NAMESPACE}:test-gpu-node-agent-extender" in condition["expression"]


def test_accounts_that_are_named_may_write_choices_and_nobody_else() -> None:
    named = "system:serviceaccount:kube-system:other"
    policy = helm.one(
        helm.template(settings=[f'policies.choicesAllowed=["{named}"]']),
        "ValidatingAdmissionPolicy",
        "-choices",
    )
    (condition,) = policy["spec"]["matchConditions"]
    allowed = condition["expression"].partition(" in ")[2].rstrip(")")
    assert yaml.safe_load(allowed) == [f"system:serviceaccount:{helm.NAMESPACE}:test-gpu-node-agent", named]


def test_the_product_s_services_lead_to_it() -> None:
    objects = made()
    selector = helm.one(objects, "Service", "-extender")["spec"]["selector"]
    for name in ("gpu-quota-admission", "nvidia-mps-scheduler-plugin"):
        assert helm.one(objects, "Service", name)["spec"]["selector"] == selector


@pytest.mark.parametrize("file", sorted(CONFIG.glob("*.yaml")), ids=lambda path: path.stem)
def test_scheduler_configurations_name_what_the_extender_serves(file: Path) -> None:
    document = yaml.safe_load(file.read_text())
    assert document["apiVersion"] == "kubescheduler.config.k8s.io/v1"
    # The flag --kubeconfig counts for nothing beside --config.
    assert document["clientConnection"]["kubeconfig"] == "/etc/kubernetes/scheduler.conf"
    named: list[str] = []
    for entry in document["extenders"]:
        verbs = {entry.get(key) for key in ("filterVerb", "preemptVerb", "prioritizeVerb", "bindVerb")} - {
            None
        }
        assert {"predicates", "preempt"} <= verbs <= {"predicates", "preempt", "priorities", "bind"}
        assert entry["urlPrefix"].endswith("/scheduler")
        if "//127.0.0.1:" in entry["urlPrefix"]:
            # Not among the names in the certificate that kubeadm makes for the API server.
            assert entry["tlsConfig"]["serverName"] == "kubernetes.default"
        named += [one["name"] for one in entry["managedResources"]]
    assert len(named) == len(set(named))
    assert sum("bindVerb" in entry for entry in document["extenders"]) <= 1


def test_every_metric_stands_in_the_document() -> None:
    text = (CONFIG.parents[1] / "docs" / "extender.md").read_text().partition("\n## Metrics\n")[2]
    told: dict[str, tuple[str, set[str]]] = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            names, kind, labels = (cell.strip() for cell in line.strip("|").split("|")[:3])
            for name in re.findall(r"`(\w+)`", names):
                told[name] = (kind, set(re.findall(r"`(\w+)`", labels)))
    metrics = ExtenderMetrics()
    metrics.requests.labels("bind", "ok")
    metrics.responses.labels("bind", "200")
    metrics.seconds.labels("bind")
    metrics.ledger.figures = LedgerFigures(1, 0, 0, 0, 0, 0.5, {"nodes": 1.0})
    served = {}
    for family in metrics.registry.collect():
        name = family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
        known = {label for sample in family.samples for label in sample.labels}
        served[name] = (family.type, known - {"le"})
    assert told == served
