"""`kubectl gpu` of pods that ask by claims, and of nodes whose GPUs are devices of DRA."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from agent.kubectl.claims import explained_claimant, explained_claims
from agent.kubectl.cluster import cluster_view
from agent.kubectl.completion import completions
from agent.kubectl.kube import MissingRight, NotFound
from agent.kubectl.main import plugin_main, plugin_parser
from agent.kubectl.text import explained_running, overview, top
from agent.kubectl.view import VisiblePods, node_view
from agent.node.annotations import digest
from tests.unit.kubectl.clusters import gpu, node, pod, viewer
from tests.unit.kubectl.test_plugin import fake

__all__ = ["fake"]

Object = dict[str, Any]
DRIVER = "gpu-node-agent.io"


def device(index: int, *holders: tuple[str, int, int], shared: bool = False, **more: Any) -> Object:
    """A GPU in mode dra: idle, held whole, or with shares."""
    made = gpu(index, mode="dra", **more)
    made["held"] = {
        "t": [100, 79, 1024] if shared else [1, 0, 0],
        "h": [[digest(uid), cores, gib] for uid, cores, gib in holders],
    }
    return made


def claimant(name: str, claim: str = "c-1", *, node: str = "", said: str = "") -> Object:
    found = pod(name, node=node)
    found["spec"]["containers"] = [{"name": "main", "resources": {"claims": [{"name": "gpu"}]}}]
    found["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "t"}]
    found["status"]["resourceClaimStatuses"] = [{"name": "gpu", "resourceClaimName": claim}]
    if said:
        condition = {"type": "PodScheduled", "status": "False", "message": said}
        found["status"]["conditions"] = [condition]
    return found


def claim(name: str, kind: str = "gpu-mps", status: Object | None = None) -> Object:
    exactly = {"deviceClassName": kind, "capacity": {"requests": {"cores": "30", "memory": "12Gi"}}}
    requests = [{"name": "gpu", "exactly": exactly}]
    return {
        "metadata": {"namespace": "team", "name": name},
        "spec": {"devices": {"requests": requests}},
        "status": status or {},
    }


def allocated(*, refused: str = "") -> Object:
    result = {
        "request": "gpu",
        "driver": DRIVER,
        "pool": f"{DRIVER}/a",
        "device": "gpu-a-0-mps",
        "consumedCapacity": {"cores": "30", "memory": "12Gi", "clients": "1"},
    }
    told = {"type": "Ready", "status": "False", "reason": "Refused", "message": refused}
    devices = [{"driver": DRIVER, "device": "gpu-a-0-mps", "conditions": [told]}] if refused else []
    return {"allocation": {"devices": {"results": [result]}}, "devices": devices}


def with_claims(
    get: Callable[[str], Any], claims: list[Object], *, own: str | None = None, classes: bool = True
) -> Callable[[str], Any]:
    """`get` with claims, of an account that may read them everywhere or in its own namespace."""

    def answer(path: str) -> Any:
        found = re.fullmatch(
            r"/apis/resource\.k8s\.io/v1(?:/namespaces/([^/]+))?/(resourceclaims|deviceclasses)(?:/(.+))?",
            path,
        )
        if found is None:
            return get(path)
        space, kind, name = found.groups()
        if kind == "deviceclasses":
            if not classes:
                raise MissingRight("list", kind, "")
            selectors = [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]
            return {"items": [{"metadata": {"name": "team-gpus"}, "spec": {"selectors": selectors}}]}
        if own and space != own:
            raise MissingRight("list", kind, space or "")
        if name:
            for each in claims:
                if each["metadata"]["name"] == name:
                    return each
            raise NotFound(name)
        return {"items": claims}

    return answer


def test_a_node_of_claims_shows_what_is_free_and_who_holds_it() -> None:
    one = node(
        "a",
        device(0, ("team/x", 30, 12), ("team/y", 45, 20), shared=True),
        device(1, ("team/z", 1, 0)),
        device(2),
        device(3, bad="Xid 79"),
        state={"desired": "dra"},
    )
    pods = [claimant("team/x", node="a"), claimant("team/y", node="a"), claimant("team/z", node="a")]
    view = cluster_view(viewer([one], pods), "team")
    assert "1 devices" in "\n".join(overview(view))
    rows = "\n".join(top(view))
    assert "team/x, team/y" in rows
    assert "75 %" in rows
    seen = node_view(one, VisiblePods(pods))
    assert "mode dra: 30 % and 12 GiB" in "\n".join(explained_running(pods[0], seen))
    assert "mode dra: a whole GPU" in "\n".join(explained_running(pods[2], seen))


def test_the_overview_lists_pods_that_wait_for_our_claims_alone() -> None:
    said = "0/1 nodes are available: 1 cannot allocate all claims."
    pods = [
        claimant("team/ours", "c-1", said=said),
        claimant("team/custom", "c-2", said=said),
        claimant("team/network", "c-3", said=said),
        claimant("team/unmade", "", said="waiting for resource claims to be created"),
    ]
    claims = [claim("c-1"), claim("c-2", "team-gpus"), claim("c-3", "nic")]
    get = viewer([node("a", device(0))], pods)
    waiting = {each["pod"]: each["reason"] for each in cluster_view(with_claims(get, claims), "x")["waiting"]}
    assert waiting == {"team/ours": said, "team/custom": said}
    tenant = with_claims(viewer([node("a", device(0))], pods, own="team"), claims, own="team", classes=False)
    view = cluster_view(tenant, "team")
    assert [each["pod"] for each in view["waiting"]] == ["team/ours"]
    assert any("list resourceclaims" in each and "gpu-operator" in each for each in view["missing"])


def test_a_cluster_without_claims_is_not_asked_for_them() -> None:
    get = viewer([node("a", gpu(0))], [pod("team/x")])
    assert [each["pod"] for each in cluster_view(get, "team")["waiting"]] == ["team/x"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({}, "asks for 1 x gpu-mps with cores 30, memory 12Gi: not allocated"),
        (allocated(), "device gpu-a-0-mps of gpu-node-agent.io/a, cores 30, memory 12Gi"),
        (allocated(refused="it has a key that is not known"), "refused: it has a key that is not known"),
    ],
)
def test_explain_says_what_a_claim_asks_for_has_and_was_told(status: Object, words: str) -> None:
    get = with_claims(viewer([], []), [claim("c-1", status=status)])
    assert words in "\n".join(explained_claims(get, claimant("team/x")))


def test_explain_of_claims_that_cannot_be_read() -> None:
    lines = explained_claims(with_claims(viewer([], []), [], own="other"), claimant("team/x"))
    assert "missing right" in lines[0]
    assert "no such ResourceClaim" in explained_claims(with_claims(viewer([], []), []), claimant("team/x"))[0]
    assert "not made of its template" in explained_claims(viewer([], []), claimant("team/x", ""))[0]


def test_explain_of_a_pod_that_waits_for_a_claim() -> None:
    seen = VisiblePods([])
    nodes = [node("a", device(0, ("team/x", 30, 12), shared=True), device(1, ("team/z", 1, 0)))]
    views = [view for each in nodes if (view := node_view(each, seen))]
    lines = explained_claimant(claimant("team/w", said="cannot allocate all claims"), ["  claim gpu"], views)
    assert lines == [
        "pod team/w waits: cannot allocate all claims",
        "  claim gpu",
        "  node a: 0 GPUs that nobody holds, the largest share is 70 %",
    ]
    assert "no node has GPUs in mode dra" in explained_claimant(claimant("team/w"), [], [])[-1]


def test_explain_goes_on_where_pods_have_claims_alone(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    waits = claimant("team/claims")
    (fake / "api_v1_namespaces_team_pods_claims").write_text(json.dumps(waits))
    (fake / "apis_resource.k8s.io_v1_namespaces_team_resourceclaims_c-1").write_text(json.dumps(claim("c-1")))
    assert plugin_main(["explain", "team/claims"]) == 0
    assert "asks for 1 x gpu-mps" in capsys.readouterr().out


def test_switch_knows_the_word(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert plugin_main(["switch", "a", "dra", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "GPU 0 (vgpu) drains until these end: team/mine, foe/secret" in said
    assert "layout" not in said


def test_the_words_of_a_mode_are_offered(fake: Any) -> None:
    words = completions(plugin_parser(), ["switch", "a", "d"], ())
    assert words == ["dra", "disable"]
