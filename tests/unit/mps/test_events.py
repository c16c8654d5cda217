"""Events of daemons, and the pods that the MPS room gets."""

import datetime as dt
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from agent.cluster.pods import CgroupUids
from agent.kit.tasks import Cell
from agent.model.holding import Holding, Record
from agent.model.pod import Metadata, Pod
from agent.mps.daemon_manager import MpsEvents
from agent.mps.daemon_parts import EventReason
from agent.mps.pods import PodFacts, pod_facts
from agent.settings import load
from tests.unit.pairing.kubelet_model import machine
from tests.wing_node import wing_node


def events_of(told: list[tuple[str, str, bool]], *holders: str) -> tuple[MpsEvents, str]:
    """The events of a node with a GPU, whose shares these pods hold."""
    snapshot = machine(gpus=2, blocks=40)
    uuid = snapshot.gpus[1].uuid
    held = tuple(
        Holding("default", name, "main", "nvidia.com/mps-core", (f"{uuid}::sc{number}",))
        for number, name in enumerate(holders)
    )
    recorder = SimpleNamespace(node=lambda reason, text, warning: told.append((reason, text, warning)))
    pods = (PodFacts("3fa85f64-5717-4562-b3fc-2c963f66afa6", "default", "silent"),)
    node = wing_node(
        load(None, {}),
        snapshot=Cell(snapshot),
        holdings=SimpleNamespace(cell=Cell(Record(held, ()))),
        cluster=SimpleNamespace(events=recorder),
    )
    return MpsEvents(node, lambda: pods), uuid


def test_a_fault_names_the_pods_that_must_be_started_anew_and_the_process_of_the_log() -> None:
    told: list[tuple[str, str, bool]] = []
    events, uuid = events_of(told, "one", "two")
    events.report(EventReason.FAULT, uuid, "a client's fatal error: sticky", frozenset({4711}))
    ((reason, text, warning),) = told
    assert (reason, warning) == ("MPSFault", True)
    assert text.startswith(f"GPU 1 ({uuid}): a client's fatal error: sticky")
    assert "default/one, default/two must be restarted" in text
    assert text.endswith("the log names process 4711")


def test_who_said_nothing_is_named_by_its_pod() -> None:
    told: list[tuple[str, str, bool]] = []
    events, uuid = events_of(told, "one")
    events.report(
        EventReason.SILENT, uuid, "process 7 of user 1 in pod 3fa85f64-5717-4562-b3fc-2c963f66afa6 said"
    )
    assert told == [
        ("MPSSilentClient", f"GPU 1 ({uuid}): process 7 of user 1 in pod default/silent said", True)
    ]


def test_recovery_is_no_warning_and_concerns_no_pod() -> None:
    told: list[tuple[str, str, bool]] = []
    events, uuid = events_of(told, "one")
    events.report(EventReason.RECOVERED, uuid, "the MPS control daemon serves again")
    assert told == [("MPSRecovered", f"GPU 1 ({uuid}): the MPS control daemon serves again", False)]


def test_pods_are_known_by_what_their_cgroups_carry() -> None:
    text = """{"metadata": {"uid": "u1", "name": "p", "namespace": "n",
        "deletionTimestamp": "2026-11-22T01:00:00Z", "deletionGracePeriodSeconds": 30}}"""
    plain = msgspec.json.decode(text, type=Pod)
    static = Pod(Metadata(uid="u2", name="s", namespace="n"))
    pods = {"u1": plain, "abc": static}
    facts = pod_facts(cast("Any", SimpleNamespace(cgroup_uids=lambda: CgroupUids(pods))))()
    assert [(each.uid, each.key, each.dies_at, each.grace_seconds) for each in facts] == [
        ("u1", "n/p", dt.datetime(2026, 11, 22, 1, tzinfo=dt.UTC), 30),
        ("abc", "n/s", None, None),
    ]
