"""The alerts of the chart read what a real extender's page has: names, labels and their values."""

import re
from collections.abc import Sequence

import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.component.extender.api import ClusterApi, gpus
from tests.component.extender.replicas import leader
from tests.component.monitoring.queries import RULES

SELECTOR = re.compile(r"(gpu_agent_extender_\w+)(?:{([^}]*)})?")
MATCHER = re.compile(r'(\w+)(=~?)"([^"]*)"')


async def test_each_alert_of_the_extender_selects_series_of_a_real_one() -> None:
    (path,) = (each for each in RULES if each.stem == "extender")
    rules = [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    api = ClusterApi()
    api.node("a", *gpus(2))
    async with api.serving(), leader(api) as scheduler:
        assert (await scheduler.post("bind", b"{"))[0] == 400
        gone = api.pod("gone", 60, 10)
        api.end("gone")
        assert await scheduler.bind(gone, "a")
        _, page = await scheduler.get("/metrics")
    samples = [each for family in text_string_to_metric_families(page) for each in family.samples]
    for rule in rules:
        selected = [_selected(samples, *each) for each in SELECTOR.findall(rule["expr"])]
        assert selected, rule["alert"]
        assert all(selected), f"{rule['alert']} selects nothing of a real extender"
        for labels in re.findall(r"by \(([^)]*)\)", rule["expr"]):
            # The cluster's name is Prometheus's to add, where several write to one place.
            ours = set(labels.split(", ")) - {"cluster"}
            assert any(ours <= set(found[0].labels) for found in selected), rule["alert"]


def _selected(samples: Sequence[Sample], name: str, inside: str) -> list[Sample]:
    wanted = MATCHER.findall(inside)
    return [
        sample
        for sample in samples
        if sample.name == name
        and all(re.fullmatch(value, sample.labels.get(label, "")) for label, _, value in wanted)
    ]
