"""`kubectl gpu` where annotations, rights or the terminal are unusual; answers as the extender gives them."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.extender.choice import refusal
from agent.extender.free_capacity import HeldUnits, PodClaim, free_capacity
from agent.extender.packing import SearchWork
from agent.extender.pod_demand import PodDemand, pod_demand
from agent.kubectl.cluster import cluster_view
from agent.kubectl.commands import shown
from agent.kubectl.fit import lacks
from agent.kubectl.kube import failure
from agent.kubectl.main import plugin_main, plugin_parser
from agent.kubectl.text import overview, top
from agent.kubectl.view import HOLDERS, INVENTORY, STATE, VisiblePods, asks, node_view
from agent.model.modes import Mode, units
from agent.model.node_inventory import decode
from agent.model.pod import Container, Impossible, Stage
from tests.pods import a_pod
from tests.unit.kubectl.clusters import gpu, node, pod, viewer
from tests.unit.kubectl.test_plugin import asked, fake

__all__ = ["fake"]

Held = tuple[str, int, int]
CORES, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
MPS_CORES, MPS_MEMORY = "nvidia.com/mps-core", "nvidia.com/mps-memory"
Limits = dict[str, int]


def extender_says(one: dict[str, Any], held: list[Held], mode: Mode, init: Limits, main: Limits) -> bool:
    claims = [
        PodClaim(PodDemand(), (HeldUnits("GPU-a-0", mode, cores, blocks),)) for _, cores, blocks in held
    ]
    inventory = decode(one["metadata"]["annotations"][INVENTORY])
    containers = [Container("init", init, Stage.INIT)] * bool(init) + [Container("main", main)]
    try:
        demand = pod_demand(a_pod("t", "p", tuple(containers)))
    except Impossible:
        return False
    return not refusal(free_capacity(inventory, claims), demand, inventory, SearchWork(1000))


@pytest.mark.parametrize(
    ("held", "more", "init", "main", "right"),
    [
        ([("f/x", 30, 100)], {}, {}, {CORES: 70, MEMORY: 220}, True),
        ([("f/x", 30, 100)], {}, {}, {CORES: 70, MEMORY: 221}, False),
        ([], {}, {}, {CORES: 100, MEMORY: 400}, True),  # all of a GPU, whatever memory is asked for
        ([], {}, {}, {CORES: 100}, True),
        ([("f/x", 0, 16)], {}, {}, {CORES: 100, MEMORY: 1}, False),
        ([("f/x", 0, 16)], {}, {}, {CORES: 200, MEMORY: 1}, False),
        ([("f/x", 100, 16)], {}, {}, {MEMORY: 16}, False),
        ([], {}, {}, {CORES: 30}, False),
        ([], {}, {}, {CORES: 150, MEMORY: 1}, False),
        ([("f/x", 30, 100)], {"g": 40, "mem": 81920 - 150 * 256}, {}, {CORES: 31, MEMORY: 1}, False),
        ([("f/x", 30, 100)], {"g": 40, "mem": 81920 - 150 * 256}, {}, {CORES: 30, MEMORY: 70}, True),
        ([("f/x", 30, 100)], {"g": 40, "mem": 81920 - 150 * 256}, {}, {CORES: 30, MEMORY: 71}, False),
        ([("f/x", 50, 10)], {}, {CORES: 80, MEMORY: 1}, {CORES: 20, MEMORY: 1}, False),
    ],
)
def test_explain_answers_as_the_extender_does(
    held: list[Held], more: dict[str, Any], init: Limits, main: Limits, right: bool
) -> None:
    one = node("a", gpu(0, *held, **more))
    spec = {
        "initContainers": [{"name": "init", "resources": {"limits": init}}],
        "containers": [{"name": "main", "resources": {"limits": main}}],
    }
    view = node_view(one, VisiblePods([]))
    assert view is not None
    waits = {"metadata": {"name": "p"}, "spec": json.loads(json.dumps(spec), parse_int=str)}
    assert extender_says(one, held, Mode.VGPU, init, main) is right
    assert (lacks(view, waits) == "") is right


def share(mode: Mode) -> st.SearchStrategy[Limits]:
    core, memory = {Mode.VGPU: (CORES, MEMORY), Mode.MPS: (MPS_CORES, MPS_MEMORY)}[mode]
    cores = st.sampled_from([0, 1, 20, 40, 50, 60, 100, 150, 200] + [20, 30, 40] * 4)
    return st.builds(
        lambda a, b: {core: a, memory: b}, cores, st.sampled_from([0, 1, 4, 10, 16, 30, 70, 160])
    )


Requests = list[tuple[Stage, Limits]]
_limits = st.one_of(
    st.just({}),
    share(Mode.VGPU),
    share(Mode.VGPU),
    share(Mode.VGPU),
    share(Mode.MPS),
    st.builds(lambda count: {"nvidia.com/gpu": count}, st.integers(0, 3)),
    st.builds(lambda one, other: {**one, **other}, share(Mode.VGPU), share(Mode.MPS)),
)
_containers: st.SearchStrategy[Requests] = st.builds(
    lambda inits, apps: [*inits, *((Stage.APP, limits) for limits in apps)],
    st.lists(st.tuples(st.sampled_from([Stage.INIT, Stage.SIDECAR]), _limits), max_size=3),
    st.lists(_limits, min_size=1, max_size=3),
)
_gpus = st.lists(
    st.tuples(
        st.sampled_from([Mode.VGPU, Mode.VGPU, Mode.MPS, Mode.PGPU]),
        st.lists(st.tuples(st.sampled_from([0, 10, 50, 100]), st.sampled_from([1, 16, 200])), max_size=2),
        st.sampled_from([0, 2, 3]),  # the ceiling of MPS clients
    ),
    min_size=1,
    max_size=4,
)


def both_say(gpus: list[tuple[Mode, list[tuple[int, int]], int]], containers: Requests) -> tuple[bool, str]:
    """Whether the extender finds a place, and why the plugin finds none."""
    made, claims, named = [], [], []
    for index, (mode, before, ceiling) in enumerate(gpus):
        total = {"pgpu": [1, 0, 0], "vgpu": [100, 320, 256], "mps": [100, 79, 1024]}[mode.value]
        if mode is Mode.MPS:
            held = [(min(cores, 50), 1) for cores, _ in before]
        else:
            held = [(1, 0)] * bool(before) if mode is Mode.PGPU else before
        more = {"c": ceiling} if mode is Mode.MPS and ceiling else {}
        one = gpu(
            index, *((f"{index}{at}", *each) for at, each in enumerate(held)), **{"m": mode.value, **more}
        )
        one["held"]["t"] = total
        made.append(one)
        units = [HeldUnits(f"GPU-a-{index}", mode, *each) for each in held if mode is not Mode.PGPU]
        claims += [PodClaim(PodDemand(), (each,)) for each in units]
        claims += [PodClaim(PodDemand(gpus=1), ())] * (mode is Mode.PGPU and bool(held))
    one = node("a", *made)
    spec: dict[str, list[Any]] = {"initContainers": [], "containers": []}
    for at, (stage, limits) in enumerate(containers):
        each = {"name": f"c{at}", "resources": {"limits": {key: str(n) for key, n in limits.items()}}}
        named.append(Container(f"c{at}", limits, stage))
        always = {"restartPolicy": "Always"} if stage is Stage.SIDECAR else {}
        spec["containers" if stage is Stage.APP else "initContainers"].append({**each, **always})
    view = node_view(one, VisiblePods([]))
    assert view is not None
    reason = lacks(view, {"metadata": {"name": "p"}, "spec": spec})
    inventory = decode(one["metadata"]["annotations"][INVENTORY])
    try:
        demand = pod_demand(a_pod("t", "p", tuple(named)))
    except Impossible:
        return False, reason
    return not refusal(free_capacity(inventory, claims), demand, inventory, SearchWork()), reason


_WHOLE = {CORES: 100, MEMORY: 78}


@settings(max_examples=500)
@given(_gpus, _containers)
@example([(Mode.VGPU, [], 0), (Mode.VGPU, [], 0)], [(Stage.APP, _WHOLE), (Stage.APP, _WHOLE)])
def test_explain_answers_as_the_extender_does_for_any_pod(
    gpus: list[tuple[Mode, list[tuple[int, int]], int]], containers: Requests
) -> None:
    right, reason = both_say(gpus, containers)
    assert (reason == "") is right, reason


def test_explain_counts_clients_of_mps() -> None:
    first = gpu(0, ("f/x", 10, 1), ("f/y", 10, 1), c=2, m="mps")
    first["held"]["t"] = [100, 79, 1024]
    one = node("a", first)
    view = node_view(one, VisiblePods([]))
    assert view is not None
    waits = pod("t/p")
    waits["spec"]["containers"][0]["resources"]["limits"] = {MPS_CORES: "10", MPS_MEMORY: "1"}
    assert not extender_says(one, [("", 10, 1), ("", 10, 1)], Mode.MPS, {}, {MPS_CORES: 10, MPS_MEMORY: 1})
    assert "ceiling of MPS clients" in lacks(view, waits)


def test_containers_that_fit_side_by_side_in_one_way_alone() -> None:
    first, second = gpu(0, ("f/x", 50, 310)), gpu(1, ("f/y", 60, 220))
    view = node_view(node("a", first, second), VisiblePods([]))
    assert view is not None
    waits = pod("t/p", 40, 10)
    waits["spec"]["containers"].append(pod("t/q", 35, 90)["spec"]["containers"][0])
    assert lacks(view, waits) == ""
    waits["spec"]["containers"].append(pod("t/q", 35, 90)["spec"]["containers"][0])
    assert lacks(view, waits).endswith("beside its other containers")


def test_a_sentence_that_was_cut_within_a_namespace() -> None:
    said = ("waiting for 9 pod(s) to end: " + ", ".join(["secret/" + "x" * 59] * 9))[:400]
    for start in range(60):
        view = node_view(node("a", gpu(0), state={"message": ("w" * start + said)[:400]}), VisiblePods([]))
        assert view is not None
        assert "sec" not in view["message"]


@pytest.mark.parametrize(
    ("text", "count"), [("1k", 1000), ("1e3", 1000), ("2Ki", 2048), ("1T", 10**12), ("400", 400)]
)
def test_quantities_are_read_as_the_api_server_writes_them(text: str, count: int) -> None:
    waits = pod("t/p")
    waits["spec"]["containers"][0]["resources"]["limits"] = {MEMORY: text}
    assert asks(waits)
    assert units(text) == count
    view = node_view(node("a", gpu(0)), VisiblePods([]))
    assert view is not None
    assert f" {count} blocks" in lacks(view, waits)


@pytest.mark.parametrize(
    "annotation",
    [
        {INVENTORY: '{"v":1,"gpus":[{"u":"GPU-x"}]}'},
        {INVENTORY: '{"gpus":{"a":1}}'},
        {INVENTORY: '{"gpus":[{"i":1e999}]}'},
        {HOLDERS: '{"gpus":[]}'},
        {HOLDERS: '{"gpus":{"GPU-a-0":{"t":[1],"h":[]}}}'},
        {HOLDERS: '{"gpus":{"GPU-a-0":{"t":[100,1,1],"h":[["x","y",1]]}}}'},
        {STATE: '{"gpus":[]}'},
    ],
)
def test_annotations_of_one_node_that_cannot_be_understood_leave_the_others(
    annotation: dict[str, str],
) -> None:
    nodes = [node("a", gpu(0), annotations=annotation), node("b", gpu(0, node="b"))]
    view = cluster_view(viewer(nodes, [pod("t/p")]), "t")
    assert [len(each["gpus"]) for each in view["nodes"]] == [0, 1]
    assert "its annotations cannot be understood" in "\n".join(overview(view))
    assert top(view)


def test_an_annotation_that_nests_too_deep_is_no_object() -> None:
    nodes = [node("a", gpu(0), annotations={STATE: "[" * 100_000}), node("b", gpu(0, node="b"))]
    assert [each["name"] for each in cluster_view(viewer(nodes, []), "t")["nodes"]] == ["a", "b"]


def test_a_missing_right_names_only_roles_that_have_it() -> None:
    said = 'User "e" cannot {} resource "{}" in API group "" in the namespace "t"'
    assert "gpu-viewer or gpu-operator has it" in str(failure(said.format("list", "nodes")))
    assert str(failure(said.format("list", "events"))).endswith("ClusterRole gpu-operator has it")
    assert str(failure(said.format("patch", "pods"))) == "missing right: patch pods in namespace t"


def test_holders_that_an_earlier_agent_does_not_say_are_not_shown_as_none() -> None:
    old = node("a", gpu(0))
    del old["metadata"]["annotations"][HOLDERS]
    row = top(cluster_view(viewer([old], []), "t"))[1].split()
    assert row[:5] == ["a", "0", "vgpu", "?", "?"]
    assert row[-1] == "?"


def changed(fake: Path, name: str, **metadata: Any) -> dict[str, Any]:
    file = fake / f"api_v1_{name}"
    found: dict[str, Any] = json.loads(file.read_text())
    found["metadata"].update(metadata)
    file.write_text(json.dumps(found))
    return found


def test_what_a_switch_drains_is_not_known_of_an_earlier_agent(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = changed(fake, "nodes_a")
    del found["metadata"]["annotations"][HOLDERS]
    changed(fake, "nodes_a", annotations=found["metadata"]["annotations"])
    assert plugin_main(["switch", "a", "pgpu", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "not known" in said
    assert "nothing drains" not in said


def test_what_a_switch_to_another_word_for_the_mode_drains(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plugin_main(["switch", "a", "enable", "--dry-run"]) == 0
    assert "nothing drains" in capsys.readouterr().out
    assert plugin_main(["switch", "a", "halves", "--dry-run"]) == 0
    assert "if layout halves gives it another mode" in capsys.readouterr().out


@pytest.mark.parametrize(("word", "desired"), [("disable", "none"), ("enable", "vgpu"), ("mps", "mps")])
def test_a_wait_knows_the_agents_word_for_the_mode(
    fake: Path, capsys: pytest.CaptureFixture[str], word: str, desired: str
) -> None:
    state = json.dumps({"state": "applied", "desired": desired, "gpus": {}})
    found = json.loads((fake / "api_v1_nodes_a").read_text())
    changed(fake, "nodes_a", annotations={**found["metadata"]["annotations"], STATE: state})
    assert plugin_main(["switch", "a", word, "--wait", "--timeout", "1"]) == 0
    assert f"mode {word} is in force" in capsys.readouterr().out


def test_a_resize_keeps_what_was_asked_for_before(fake: Path) -> None:
    resize = "gpu-node-agent.io/resize"
    notes = {resize: '{"main":{"memory":60,"cores":20},"other":5}'}
    changed(fake, "namespaces_team_pods_mine", annotations=notes, resourceVersion="9")
    assert plugin_main(["resize", "team/mine", "--cores", "30"]) == 0
    assert asked(fake)[-1][4:] == [
        f'{resize}={{"main":{{"memory":60,"cores":30}},"other":5}}',
        "--overwrite",
        "--resource-version=9",
    ]
    changed(fake, "namespaces_team_pods_mine", annotations={resize: '{"main":60}'})
    assert plugin_main(["resize", "team/mine", "--cores", "30"]) == 0
    assert asked(fake)[-1][4] == f'{resize}={{"main":{{"memory":60,"cores":30}}}}'


def test_a_resize_is_of_the_container_with_a_share(fake: Path) -> None:
    file = fake / "api_v1_namespaces_team_pods_mine"
    found = json.loads(file.read_text())
    proxy = {"name": "proxy", "resources": {"limits": {"cpu": "1"}}}
    found["spec"]["containers"].insert(0, proxy)
    file.write_text(json.dumps(found))
    assert plugin_main(["resize", "team/mine", "--memory", "24"]) == 0
    assert asked(fake)[-1][4] == 'gpu-node-agent.io/resize={"main":{"memory":24}}'
    assert plugin_main(["resize", "team/mine", "--memory", "24", "-c", "proxy"]) == 1


def test_names_that_are_none(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["explain", "team/"], ["switch", "", "vgpu"], ["switch", "..", "vgpu"]):
        assert plugin_main(arguments) == 1
        assert "is no name" in capsys.readouterr().err


def test_kubectl_that_cannot_be_run_and_a_port_that_cannot_be_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECTL", str(tmp_path))
    assert plugin_main(["--output", "json"]) == 1
    assert "cannot be run" in capsys.readouterr().err
    assert plugin_main(["page", "--port", "99999"]) == 1
    assert "port 99999 cannot be served" in capsys.readouterr().err


def test_options_before_the_command_count() -> None:
    for command in (["top"], ["explain", "x"]):
        found = plugin_parser().parse_args(["-o", "json", "-w", *command])
        assert (found.output, found.watch) == ("json", True)
        found = plugin_parser().parse_args(command)
        assert (found.output, found.watch) == (None, False)


def test_watched_documents_stand_in_one_line_each_and_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([{"at": "1", "n": 1}, {"at": "2", "n": 1}, {"at": "3", "n": 2}])
    options = argparse.Namespace(output="json", watch=True)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(StopIteration):
        shown(options, lambda: next(answers), lambda _: [])
    found = [json.loads(line)["at"] for line in capsys.readouterr().out.splitlines()]
    assert found == ["1", "3"]


def test_top_fits_a_small_terminal_with_rights_missing() -> None:
    nodes = [node("a", *(gpu(index) for index in range(8)))]
    view = cluster_view(viewer(nodes, [], own="t"), "t")
    assert view["missing"]
    assert len(top(view, 10)) == 10
