"""`kubectl gpu`: the file, views under different rights, and what each command has kubectl do."""

import ast
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.kubectl.cluster import cluster_view
from agent.kubectl.kube import MissingRight, failure
from agent.kubectl.main import plugin_main
from agent.kubectl.text import explained_running, explained_waiting, overview, top
from agent.kubectl.view import CORDON, VisiblePods, node_view
from tests import plugin_file
from tests.unit.kubectl.clusters import gpu, node, pod, viewer

ALLOWED = {("get", "--raw"), ("label", "node"), ("annotate", "node"), ("annotate", "pod"), ("config", "view")}


def test_the_file_is_made_of_the_sources() -> None:
    assert plugin_file.FILE.read_text() == plugin_file.joined(), "make docs"
    assert os.access(plugin_file.FILE, os.X_OK)


def test_no_two_modules_have_a_name_in_common() -> None:
    """In one file the later would take the place of the other."""
    tree = ast.parse(plugin_file.joined())
    names = [each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    targets = [each for node in tree.body if isinstance(node, ast.Assign) for each in node.targets]
    names += [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_the_file_needs_the_standard_library_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(plugin_file.FILE), "--help"],
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "explain" in done.stdout


def test_the_file_says_which_python_it_needs() -> None:
    code = f"import sys; sys.version_info = (3, 9); exec(open({str(plugin_file.FILE)!r}).read())"
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("kubectl-gpu needs Python 3.11 or newer, this is ")


def cluster() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    nodes = [
        node("a", gpu(0, ("team/mine", 30, 16), ("foe/secret", 60, 100)), gpu(1, bad="Xid 79")),
        node("b", gpu(0, ("foe/big", 1, 0), mode="pgpu", node="b"), gpu(1, mode="pgpu", node="b")),
    ]
    return nodes, [
        pod("team/mine", node="a"),
        pod("foe/secret", 60, 100, node="a"),
        pod("foe/big", gpus=1, node="b"),
        pod("team/waits", 50, 16),
    ]


def test_an_administrator_sees_all() -> None:
    view = cluster_view(viewer(*cluster()), "default")
    first = view["nodes"][0]["gpus"][0]
    assert [each["pod"] for each in first["holders"]] == ["team/mine", "foe/secret"]
    assert (first["free"], view["missing"]) == ([10, 204], [])
    text = "\n".join(overview(view))
    assert "1 unhealthy" in text
    assert "team/waits" in text
    assert "foe/secret" in "\n".join(top(view))


def test_the_overview_asks_for_no_list_of_all_pods_but_while_a_switch_waits() -> None:
    nodes, pods = cluster()
    asked_for: list[str] = []

    def get(path: str) -> Any:
        asked_for.append(path)
        return viewer(nodes, pods)(path)

    cluster_view(get, "x", names=False)
    assert [each for each in asked_for if "/pods" in each] == [
        "/api/v1/pods?fieldSelector=spec.nodeName%3D%2Cstatus.phase%3DPending"
    ]
    nodes.append(node("c", gpu(0, node="c"), state={"state": "switching", "message": "waits for foe/big"}))
    view = cluster_view(get, "x", names=False)
    assert "phase%21%3DFailed" in asked_for[-2]
    assert "foe/big" in "\n".join(overview(view))


def test_a_tenant_sees_own_names_and_the_missing_right() -> None:
    view = cluster_view(viewer(*cluster(), own="team"), "team")
    assert "foe" not in json.dumps(view)
    first = view["nodes"][0]["gpus"][0]
    assert [(each["pod"], each["cores"]) for each in first["holders"]] == [("team/mine", 30), (None, 60)]
    assert "list pods in the whole cluster" in view["missing"][0]
    blind = cluster_view(viewer(*cluster(), own="team", nodes_read=False), "team")
    text = "\n".join(overview(blind))
    assert "team/mine" in text
    assert "missing right: list nodes in the whole cluster" in text


def test_names_of_others_in_sentences_of_the_agent() -> None:
    seen = VisiblePods([pod("team/mine")])
    said = (
        "waits for 2 pods: team/mine, foe/secret.x; see tencent.com/vcuda-core, /run/gpu, 8 of nvidia.com/gpu"
    )
    assert seen.masked(said) == said.replace("foe/secret.x", "other")
    state = {
        "state": "switching",
        "message": "waiting for foe/secret",
        "gpus": {"0": {"waitingFor": ["foe/x"]}},
    }
    assert "foe" not in json.dumps(node_view(node("a", gpu(0), state=state), seen))


def test_who_a_switch_waits_for_comes_from_the_viewers_rights() -> None:
    """The node counts them; who may read the pods sees their names."""
    state = {"state": "switching", "message": "waiting for 2 pod(s) to end", "gpus": {"0": {"waitingFor": 2}}}
    nodes, pods = cluster()
    one = node("a", gpu(0, ("team/mine", 30, 16), ("foe/secret", 60, 100)), state=state)
    for known, names, waiting in (
        (pods, " (foe/secret, team/mine)", ["team/mine", "foe/secret"]),
        (pods[:1], " (team/mine)", ["team/mine", "1 other"]),
        ([], "", ["2 other"]),
    ):
        view = node_view(one, VisiblePods(known))
        assert view is not None
        assert view["message"] == f"waiting for 2 pod(s) to end{names}"
        assert view["gpus"][0]["waitingFor"] == waiting
    nodes[0] = one
    assert "2 pod(s) to end (foe/secret, team/mine)" in "\n".join(
        overview(cluster_view(viewer(nodes, pods), "x"))
    )


def test_why_a_pod_waits_by_annotations() -> None:
    nodes, pods = cluster()
    view = cluster_view(viewer(nodes, pods, own="team"), "team")
    text = "\n".join(explained_waiting(pod("team/waits", 50, 16), view))
    assert "it fits on none of 2 nodes" in text
    assert "no single GPU has 50 cores and 16 blocks of memory free; the nearest has 10 and 204 (a)" in text
    assert "no GPU is offered in mode vgpu (2 pgpu) (b)" in text
    assert "its GPUs are free on b" in "\n".join(explained_waiting(pod("team/x", gpus=1), view))
    assert "1 of 2 GPUs free" in "\n".join(explained_waiting(pod("team/x", gpus=2), view))
    assert "its GPUs are free on a" in "\n".join(explained_waiting(pod("team/x", 10, 200), view))
    nodes[1]["spec"]["unschedulable"] = True
    view = cluster_view(viewer(nodes, pods), "team")
    assert "cordoned (unschedulable)" in "\n".join(explained_waiting(pod("team/x", gpus=1), view))


def test_what_a_running_pod_has_and_who_is_beside_it() -> None:
    nodes, pods = cluster()
    lines = explained_running(pods[0], node_view(nodes[0], VisiblePods(pods[:1])))
    assert lines == [
        "pod team/mine is bound to node a",
        "  GPU 0 (GPU-a-0), mode vgpu: 30 % and 4 GiB",
        "    beside it: 1 other (60 % and 25 GiB)",
    ]


def test_earlier_agents_say_nothing_of_holders() -> None:
    old = node("a", gpu(0))
    del old["metadata"]["annotations"]["gpu-node-agent.io/holders"]
    view = cluster_view(viewer([old], []), "x")
    assert overview(view)[1].split()[4:] == ["?", "-", "-", "-"]
    assert "earlier version" in "\n".join(explained_waiting(pod("x/y"), view))


def test_the_missing_right_is_taken_from_what_kubectl_says() -> None:
    said = (
        'Error from server (Forbidden): pods is forbidden: User "eve" cannot list resource "pods" in API '
        'group "" in the namespace "team"'
    )
    found = failure(said)
    assert isinstance(found, MissingRight)
    assert (found.verb, found.resource, found.namespace) == ("list", "pods", "team")
    wide = failure(
        'nodes is forbidden: User "eve" cannot list resource "nodes" in API group "" at the cluster scope'
    )
    assert isinstance(wide, MissingRight)
    assert wide.namespace == ""


FAKE = """#!{python}
import json, os, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + "\\n")
arguments = [each for each in arguments if not each.startswith("--") or each == "--raw"]
if arguments[0] == "get":
    path = arguments[2].partition("?")[0]
    print(open(os.path.join({folder!r}, path.strip("/").replace("/", "_"))).read())
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubectl that answers from files and notes what it is asked for."""
    nodes, pods = cluster()
    answers: dict[str, Any] = {"nodes": {"items": nodes}, "pods": {"items": pods}}
    answers |= {f"nodes_{each['metadata']['name']}": each for each in nodes}
    for each in pods:
        meta = each["metadata"]
        answers[f"namespaces_{meta['namespace']}_pods_{meta['name']}"] = each
        answers[f"namespaces_{meta['namespace']}_events"] = {"items": []}
    for name, document in answers.items():
        (tmp_path / f"api_v1_{name}").write_text(json.dumps(document))
    program = tmp_path / "kubectl"
    program.write_text(FAKE.format(python=sys.executable, log=str(tmp_path / "log"), folder=str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("KUBECTL", str(program))
    return tmp_path


def asked(fake: Path) -> list[list[str]]:
    return [json.loads(line) for line in (fake / "log").read_text().splitlines()]


def test_each_command_has_kubectl_get_label_or_annotate(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plugin_main(["switch", "a", "pgpu"]) == 0
    assert "GPU 0 (vgpu) drains until these end: team/mine, foe/secret" in capsys.readouterr().out
    assert asked(fake)[-1] == ["label", "node", "a", "nvidia-device-enable=pgpu", "--overwrite"]
    assert plugin_main(["cordon", "a/1", "--reason", "fan  noise"]) == 0
    assert "is cordoned" in capsys.readouterr().out
    value = f'{CORDON}={{"GPU-a-1":{{"reason":"fan noise"}}}}'
    assert asked(fake)[-1] == ["annotate", "node", "a", value, "--overwrite", "--resource-version=7"]
    assert plugin_main(["uncordon", "GPU-b-0"]) == 0
    assert asked(fake)[-1][2:4] == ["b", f"{CORDON}-"]
    assert plugin_main(["resize", "team/mine", "--memory", "24"]) == 0
    resize = 'gpu-node-agent.io/resize={"main":{"memory":24}}'
    whole = ["annotate", "pod", "mine", "--namespace=team", resize, "--overwrite", "--resource-version="]
    assert asked(fake)[-1] == whole
    assert plugin_main(["explain", "team/mine"]) == 0
    assert plugin_main(["explain", "waits", "-n", "team"]) == 0
    assert plugin_main(["top", "--once"]) == 0
    assert plugin_main(["-o", "json"]) == 0
    assert plugin_main(["cordon", "a/9"]) == 1
    assert "there is no GPU a/9" in capsys.readouterr().err
    assert {tuple(each[:2]) for each in asked(fake)} <= ALLOWED


def test_cordons_that_cannot_be_read_are_not_written_over(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = fake / "api_v1_nodes_a"
    found = json.loads(file.read_text())
    found["metadata"]["annotations"][CORDON] = '{"GPU-a-0": '
    file.write_text(json.dumps(found))
    assert plugin_main(["cordon", "a/1"]) == 1
    assert "mend or remove it first" in capsys.readouterr().err
    found["metadata"]["annotations"][CORDON] = "0=fan, 1"
    file.write_text(json.dumps(found))
    assert plugin_main(["uncordon", "a/1"]) == 0
    assert asked(fake)[-1][3] == f'{CORDON}={{"0":{{"reason":"fan"}}}}'


def test_flags_of_kubectl_are_passed_on(fake: Path) -> None:
    assert plugin_main(["top", "--once", "--context=c", "--as=eve", "-n", "team"]) == 0
    assert asked(fake)[0][:2] == ["--context=c", "--as=eve"]


def test_kubectl_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECTL", "/nowhere/kubectl")
    assert plugin_main([]) == 1
    assert "/nowhere/kubectl is not in PATH: install kubectl" in capsys.readouterr().err


def test_500_nodes_in_2_s() -> None:
    nodes = [
        node(f"n{at}", *(gpu(each, (f"team/p{at}", 30, 16), node=f"n{at}") for each in range(8)))
        for at in range(500)
    ]
    pods = [pod(f"team/p{at}", node=f"n{at}") for at in range(500)]
    texts = {True: json.dumps({"items": nodes}), False: json.dumps({"items": pods})}
    began = time.process_time()
    view = cluster_view(
        lambda path: json.loads(texts["/nodes" in path]) if "events" not in path else {"items": []}, ""
    )
    assert len(overview(view)) == 501
    assert time.process_time() - began < 2


def test_the_wheel_carries_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=plugin_file.ROOT, check=True, capture_output=True, timeout=50)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (script,) = [name for name in packed.namelist() if name.endswith("/scripts/kubectl-gpu")]
        first, rest = packed.read(script).decode().split("\n", 1)
    assert first == "#!python"  # which pip makes the interpreter's path of
    assert rest == plugin_file.joined().split("\n", 1)[1]


def test_the_krew_archive_is_the_same_for_the_same_sources() -> None:
    made = []
    for _ in range(2):
        command = [".ci/krew", "v1.2.3", "https://example.com/kubectl-gpu.tar.gz"]
        subprocess.run(command, cwd=plugin_file.ROOT, check=True, capture_output=True, timeout=30)
        archive = (plugin_file.ROOT / "build" / "kubectl-gpu.tar.gz").read_bytes()
        manifest = yaml.safe_load((plugin_file.ROOT / "build" / "gpu.yaml").read_text())
        made.append((archive, manifest))
    assert made[0] == made[1]
    (platform,) = manifest["spec"]["platforms"]
    assert platform["sha256"] == hashlib.sha256(archive).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        assert packed.getnames() == ["kubectl-gpu", "LICENSE"]


@pytest.mark.parametrize(("conflicts", "code"), [(2, 0), (9, 1)])
def test_what_changed_in_between_is_read_again(
    fake: Path, capsys: pytest.CaptureFixture[str], conflicts: int, code: int
) -> None:
    (fake / "left").write_text("x" * conflicts)
    program = fake / "kubectl"
    program.write_text(
        program.read_text()
        + f"""
left = open({str(fake / "left")!r}).read()
if arguments[0] == "annotate" and left:
    open({str(fake / "left")!r}, "w").write(left[1:])
    sys.exit("Error from server (Conflict): the object has been modified; please try again")
"""
    )
    assert plugin_main(["cordon", "a/1"]) == code
    said = capsys.readouterr()
    assert ("is cordoned" in said.out, "Conflict" in said.err) == (code == 0, code == 1)
    assert [each[0] for each in asked(fake)].count("get") >= min(conflicts, 4) + 1
