"""The report as a person reads it."""

from typing import Any

import pytest

from agent.status.table import duration, render


def gpu(index: int, **health: Any) -> dict[str, Any]:
    state = {
        "state": "healthy",
        "served": True,
        "cause": "",
        "obstacle": "",
        "remedy": "",
        "forSeconds": None,
        "probationLeftSeconds": None,
        "events": True,
    }
    return {
        "index": index,
        "uuid": f"GPU-{index:08d}",
        "model": "NVIDIA H200",
        "memoryBytes": 141 << 30,
        "numaNode": index % 2 if index else None,
        "mode": {"active": "pgpu", "wanted": "pgpu", "selling": True, "reason": "", "waitingFor": []},
        "health": state | health,
        "lastXid": None,
        "holders": [],
    }


def report(*gpus: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "version": "1.2.3",
        "ready": True,
        "blockers": [],
        "driver": "580.95.05",
        "cuda": "13.0",
        "mode": {"desired": "pgpu", "phase": "applied", "message": ""},
        "injection": {"way": "cdi", "reason": ""},
        "releasedForSeconds": None,
        "problems": [],
        "gpus": list(gpus),
        "unreadable": [],
    } | more


def test_a_healthy_node_is_a_headline_and_a_table() -> None:
    held = gpu(1) | {
        "holders": [{"pod": "ml/train", "container": "main", "units": {"tencent.com/vcuda-core": 30}}]
    }
    lines = render(report(gpu(0), held)).splitlines()
    assert lines[0].startswith("gpu-node-agent 1.2.3 | ready | driver 580.95.05, CUDA 13.0 | mode pgpu")
    at = lines.index("")
    assert lines[at + 1].split() == ["GPU", "UUID", "MODEL", "MEMORY", "NUMA", "MODE", "HEALTH"]
    assert lines[at + 2].split() == [
        "0",
        "GPU-00000000",
        "NVIDIA",
        "H200",
        "141",
        "GiB",
        "-",
        "pgpu",
        "healthy",
    ]
    assert lines[-1].split() == ["1", "ml/train", "main", "30", "vcuda-core"]


def test_status_in_100_columns() -> None:
    """One line for each GPU, holders below, each container once; nothing is longer than the terminal."""
    units = {"tencent.com/vcuda-core": 30, "tencent.com/vcuda-memory": 16}
    held = {"holders": [{"pod": "a-team/a-notebook", "container": "main", "units": units}] * 3}
    why = "the kubelet does not answer: " + "no such file, " * 20
    gpus = [
        gpu(each, forSeconds=4e5) | held | {"model": "NVIDIA A100-SXM4-80GB and more"} for each in range(8)
    ]
    found = report(*gpus, problems=[why], holdersAgeSeconds=42.0)
    text = render(found)
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("a-team/a-notebook") == 24
    assert sum(line.startswith(tuple("01234567")) and "GPU-" in line for line in text.splitlines()) == 8
    assert "holders as last known, 42 s ago" in text
    assert max(map(len, render(found, columns=None).splitlines())) > 250
    assert max(map(len, render(found, columns=72).splitlines())) <= 72


def test_a_cordon_is_shown_whatever_else_is_not_known() -> None:
    cordoned = gpu(3) | {"cordon": {"since": "2026-11-23T10:00:00Z", "reason": "fan"}}
    reason = "cordoned since 2026-11-23T10:00:00Z: fan"
    cordoned["mode"] = cordoned["mode"] | {"active": "off", "wanted": "off", "reason": reason}
    text = render(report(gpu(0), cordoned))
    assert "off (cordoned)" in text
    assert f"GPU 3: not offered: {reason}" in text


def test_a_sick_gpu_is_told_with_cause_and_remedy() -> None:
    sick = gpu(
        3,
        state="unhealthy",
        served=False,
        cause="Xid 79, GPU has fallen off the bus",
        obstacle="the GPU is lost",
        remedy="reboot the node",
        forSeconds=200.0,
    )
    text = render(report(gpu(0), sick))
    assert "unhealthy for 3 min" in text
    assert text.splitlines()[-3:] == [
        "GPU 3: Xid 79, GPU has fallen off the bus",
        "       the GPU is lost",
        "       what to do: reboot the node",
    ]
    assert "\033[31m" in render(report(sick), colours=True)


def test_a_switch_says_what_it_waits_for() -> None:
    mode = {"desired": "mps", "phase": "switching", "message": "waiting for 1 pod(s) to end: ml/train"}
    lines = render(report(gpu(0), mode=mode)).splitlines()
    at = lines.index("")
    assert lines[at - 1] == "mode mps is not in force everywhere yet: waiting for 1 pod(s) to end: ml/train"


def test_probation_release_and_blockers_are_seen_at_once() -> None:
    waiting = gpu(0, state="probation", served=False, probationLeftSeconds=95.0, forSeconds=5.0, cause="x")
    text = render(report(waiting, ready=False, blockers=["the kubelet is away"], releasedForSeconds=300.0))
    assert "probation, 95 s left" in text
    assert "NOT READY" in text
    assert "! the kubelet is away" in text
    assert "RELEASED for 5 min more" in text


def test_one_reason_for_many_gpus_is_one_line() -> None:
    unsold = [gpu(number) for number in range(3)]
    for one in unsold:
        one["mode"] = one["mode"] | {"active": "off", "wanted": "off", "reason": "no mode is set"}
    assert render(report(*unsold)).splitlines()[-1] == "GPU 0, 1, 2: not offered: no mode is set"


def test_a_switch_shows_from_and_to_and_whom_it_waits_for() -> None:
    switching = gpu(0)
    switching["mode"] = switching["mode"] | {"wanted": "mps", "selling": False, "waitingFor": ["ml/a"]}
    text = render(report(switching))
    assert "pgpu -> mps" in text
    assert "GPU 0: waits for ml/a" in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (119, "119 s"), (150, "2 min"), (7200, "2 h"), (11100, "3 h 5 min"), (187200, "2 d 4 h")],
)
def test_durations_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words
