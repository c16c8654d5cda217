"""`check nodes` against a scripted API server: every node answers, or is named."""

from typing import Any

import pytest

from agent.check import collecting
from agent.check.collecting import collect
from agent.model.look import GOOD, NOT_SEEN, WRONG
from tests.component.cluster.scripted import serving
from tests.component.cluster.server import Answer, objects, page

DAEMONSET = "/apis/apps/v1/namespaces/ns/daemonsets/preflight"
PODS = "/api/v1/namespaces/ns/pods"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "POLL_SECONDS", 0.01)


def wanted(count: int, *, observed: int = 1) -> Answer:
    status = {"observedGeneration": observed, "desiredNumberScheduled": count}
    return objects({"metadata": {"name": "preflight", "uid": "u", "generation": 1}, "status": status})


def pod(node: str, container: dict[str, Any] | None = None, owner: str = "u") -> dict[str, Any]:
    return {
        "metadata": {"name": f"preflight-{node}", "ownerReferences": [{"name": "preflight", "uid": owner}]},
        "spec": {"nodeName": node},
        "status": {"phase": "Pending", "containerStatuses": [container] if container else []},
    }


def ended(node: str, code: int, message: str = "a\nb", *, again: bool = False) -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "message": message}}
    if again:  # the kubelet has started it again
        return pod(node, {"state": {"running": {}}, "lastState": state})
    return pod(node, {"state": state})


async def collected(seconds: float, daemonset: list[Answer], *pods: Answer) -> tuple[int, str]:
    said: list[str] = []
    async with serving() as (fake, api):
        fake.script(DAEMONSET, *daemonset)
        fake.script(PODS, *pods)
        code = await collect(api, "ns", ["preflight"], seconds, said.append)
        assert fake.of(PODS)[0].query == {"labelSelector": "app.kubernetes.io/component=preflight"}
    return code, "\n".join(said)


@pytest.mark.parametrize(
    ("codes", "result"),
    [((0, 0), GOOD), ((0, 3), NOT_SEEN), ((3, 1), WRONG), ((0, 2), WRONG)],
)
async def test_all_nodes_answer(codes: tuple[int, int], result: int) -> None:
    first, second = codes
    pods = page("1", ended("n1", first, "fine"), ended("n2", second, "odd\nlast", again=True))
    code, said = await collected(30, [wanted(2, observed=0), wanted(2)], page("1"), pods)
    assert code == result
    assert "n1:\n  fine" in said
    assert "n2:\n  odd\n  last" in said
    assert said.splitlines()[-1] == f"{codes.count(0)} of 2 nodes can offer their GPUs"


async def test_a_node_that_does_not_answer_is_named_with_its_reason() -> None:
    waiting = pod("n2", {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}})
    code, said = await collected(1.5, [wanted(2)], page("1", ended("n1", 0), waiting))
    assert code == WRONG
    assert "n2: has not answered within 1.5 s: ImagePullBackOff: no such image" in said
    assert "1 of 2" in said


async def test_pods_of_a_daemonset_before_do_not_count() -> None:
    old = pod("n1", {"state": {"terminated": {"exitCode": 0, "message": "old"}}}, owner="v")
    code, said = await collected(1.5, [wanted(1)], page("1", old))
    assert code == WRONG
    assert "old" not in said


async def test_no_node_at_all_is_no_pass() -> None:
    code, said = await collected(30, [wanted(0)], page("1"))
    assert code == WRONG
    assert "no node is chosen" in said
