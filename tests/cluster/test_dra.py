"""Claims (DRA) on a real kubelet and the stock scheduler; the agent serves them under the chart's account."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agent.simulator.kubelet.pod_specs import PodClaim, PodSpec
from agent.web.control import NAME as CONTROL_SOCKET
from agent.web.control import ask
from tests.chart import helm
from tests.cluster import manifests
from tests.cluster.api import ApiClient, ApiError, Object
from tests.cluster.claims_exact import ClaimObserver
from tests.cluster.claims_mix import CORES, GIB, MEMORY_GIB, Mix
from tests.cluster.claims_node import (
    DRIVER,
    NAMESPACE,
    ClaimsNode,
    claim_of,
    claims_node,
    gpu_of,
    share,
    template,
    whole,
)
from tests.cluster.real_rig import RESOURCES
from tests.cluster.rig import Cluster
from tests.pace import scaled
from tests.scenarios import mps
from tests.scenarios.health import DOUBLE_BIT_ERROR, QUIET
from tests.scenarios.rig import GPU
from tests.scenarios.skeleton import gpu_pod

MIX = 200
RACES = 6
LATEST_SECONDS = 10.0


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[tuple[ClaimsNode, ApiClient]]:
    """The node for all tests of this file, and the API server as its agent sees it."""
    with claims_node(cluster) as made:
        yield made


@pytest.fixture
def node(served: tuple[ClaimsNode, ApiClient]) -> Iterator[ClaimsNode]:
    """The node for one test, which leaves no pod on it."""
    found, _ = served
    yield found
    found.clear()


def test_dra_unequal_mps_shares_of_strangers(node: ClaimsNode) -> None:
    """Pods that know nothing of each other share a GPU in parts of their own choice, by one daemon."""
    for name in ("one", "two"):
        node.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    pods = [share("small", 10, 4, "one"), share("large", 60, 30, "two"), share("tiny", 1, 1)]
    node.run(*pods)
    for pod, (cores, gib) in zip(pods, ((10, 4), (60, 30), (1, 1)), strict=True):
        seen = node.environment(pod)
        assert (seen[mps.PERCENTAGE], seen[mps.LIMIT]) == (str(cores), f"0={gib}G")
    (device,) = {node.device(pod) for pod in pods}
    assert [gpu.lower() for gpu in node.daemons()] == [gpu_of(device)]
    node.run(elsewhere := share("elsewhere", 40, 4))
    assert node.device(elsewhere) != device
    assert len(node.daemons()) == 2


def test_dra_mode_frees_with_its_last_share(node: ClaimsNode) -> None:
    """No label changes: the first claim chose the mode, and the last one frees it."""
    filler = whole("filler")
    shares = [share("a", 30, 10), share("b", 30, 10)]
    node.run(filler)
    node.run(*shares)
    (gpu,) = node.daemons()
    waits = whole("waits")
    node.create(waits)
    node.waits(waits)
    node.delete(shares[0])
    node.waits(waits)
    assert node.daemons().keys() == {gpu}
    node.delete(shares[1])
    node.running(waits)
    assert gpu_of(node.device(waits)) == gpu.lower()
    assert not node.daemons()
    index = node.rig.gpu_uuids().index(gpu)
    assert not node.rig.machine.gpu(gpu).compute_mode, f"GPU {index} keeps the mode of its daemon"


def test_dra_race_has_one_winner(node: ClaimsNode) -> None:
    """A whole GPU and a share are asked for at once, and one GPU is free."""
    node.run(whole("filler"))
    won = set()
    for turn in range(RACES):
        rivals = (whole(f"whole-{turn}"), share(f"share-{turn}", 30, 10))
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(node.create, pod) for pod in rivals[:: 1 - 2 * (turn % 2)]]:
                done.result()
        first, second = _winner_first(node, rivals)
        node.waits(second)
        won.add(first.name.partition("-")[0])
        node.delete(first)
        node.running(second)
        node.delete(second)
    assert won <= {"whole", "share"}
    refused = node.logged("claim_refused")
    assert not refused


def _winner_first(node: ClaimsNode, rivals: Sequence[PodSpec]) -> list[PodSpec]:
    """Wait until one of two pods runs."""

    def runs(pod: PodSpec) -> bool:
        return node.cluster.phase(pod.name) == "Running"

    node.until(lambda: any(map(runs, rivals)), "one of two runs")
    return sorted(rivals, key=lambda pod: not runs(pod))


def test_dra_random_mix_is_exact(node: ClaimsNode) -> None:
    """200 pods and more on nodes without a kubelet: bursts of deletions, restarts of the scheduler."""
    limits = {"cores": CORES, "memory": MEMORY_GIB * GIB, "clients": 48}
    with ClaimObserver(node.cluster, limits) as observer, Mix(node, seed=40) as mix:
        mix.more(MIX // 2)
        for turn in range(4):
            mix.settles()
            mix.burst(quarters=turn + 1)
            if turn % 2:
                node.cluster.stop("sched")
                node.cluster.start("sched")
            mix.more(MIX // 8)
        mix.settles()
        assert mix.made == MIX
    assert observer.events > 2 * MIX
    assert not observer.broken


def test_dra_kubelet_restart(node: ClaimsNode) -> None:
    """It deletes the slices at its start; the agent puts them back, and nobody loses anything."""
    stays = share("stays", 20, 4)
    node.run(stays)
    before = {each["metadata"]["uid"] for each in node.slices()}
    container, device = node.container(stays), node.device(stays)
    node.cluster.restart_kubelet()

    def back() -> bool:
        now = {each["metadata"]["uid"] for each in node.slices()}
        return len(now) == len(before) and not now & before

    node.until(back, "new slices after the wipe")
    node.published()
    node.run(share("after", 20, 4))
    assert (node.container(stays), node.device(stays)) == (container, device)
    assert len(node.daemons()) == 1
    node.delete(stays)
    assert not node.logged("claim_refused")


def test_dra_driver_killed(node: ClaimsNode) -> None:
    """Pods stay; of those of meanwhile, the deleted one goes and the created one runs once it is back."""
    stays, leaves = share("stays", 20, 4), share("leaves", 20, 4)
    node.run(stays, leaves)
    container, daemons = node.container(stays), node.daemons()
    node.kill()
    node.call(node.rig.ask_to_delete, leaves)
    late = share("late", 20, 4)
    node.create(late)

    def failed_once() -> bool:
        return any("FailedPrepareDynamicResources" in each for each in node.cluster.events(late.name))

    node.until(failed_once, "the kubelet has tried to prepare without a driver")
    assert "deletionTimestamp" in node.cluster.get("Pod", leaves.name)["metadata"]
    node.start()
    node.delete(leaves)
    # Not after the kubelet's resync, a minute later: the agent sets it going again.
    node.running(late, seconds=20)
    assert node.container(stays) == container
    assert node.daemons() == daemons


def test_dra_force_deletion_waits(node: ClaimsNode) -> None:
    """Its claim is free at once, its container is not gone: the next holder of the GPU waits for it."""
    node.run(whole("filler"))
    stubborn = manifests.container("main", ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
    stubborn["resources"]["claims"] = [{"name": "gpu"}]
    claims = [{"name": "gpu", "resourceClaimTemplateName": "forced"}]
    node.cluster.apply(template("forced", claim_of("mps", 30, 10)))
    pod = manifests.pod("forced", stubborn, resourceClaims=claims, terminationGracePeriodSeconds=6)
    node.cluster.apply(pod)
    node.cluster.wait_pod("forced")
    (held,) = node.logged("claim_prepared")[-1:]
    path = node.cluster.api.path("v1", "Pod", "default", "forced")
    node.cluster.api.delete(path, grace_seconds=0)
    begun = time.monotonic()
    heir = whole("heir")
    node.run(heir, seconds=30)
    assert time.monotonic() - begun < scaled(30)
    order = [
        (line["event"], line["uid"])
        for line in node.logged("claim_prepared", "claim_unprepared", "claim_refused")
    ]
    gone = order.index(("claim_unprepared", held["uid"]))
    assert [event for event, _ in order[gone + 1 :]] == ["claim_prepared"]
    node.cluster.delete("ResourceClaimTemplate", "forced", api_version=RESOURCES)


def test_dra_burst_loses_no_minute(node: ClaimsNode) -> None:
    """A preparation that the kubelet drops, by its own 403, too, would wait for a minute."""
    for burst in range(3):
        pods = [share(f"burst-{burst}-{number}", 10, 2) for number in range(10)]
        begun = time.monotonic()
        node.create(*pods)
        node.running(*pods, seconds=LATEST_SECONDS + 5)
        assert time.monotonic() - begun < scaled(LATEST_SECONDS)
        node.delete(*pods)


def test_dra_taint_keeps_the_holder(node: ClaimsNode) -> None:
    """A cordoned GPU takes nobody any more, and keeps whom it has."""
    holder = share("holder", 10, 4)
    node.run(holder)
    container, device = node.container(holder), node.device(holder)
    (gpu,) = node.daemons()
    ask(node.mps.run / CONTROL_SOCKET, "cordon", gpu=gpu, reason="fan")
    node.published(1)
    assert device in node.devices()
    node.run(other := share("other", 10, 4))
    assert node.device(other) != device
    waits = whole("waits")
    node.create(waits)
    node.waits(waits)
    assert node.container(holder) == container
    ask(node.mps.run / CONTROL_SOCKET, "uncordon", gpu=gpu)
    node.published(2)
    node.delete(holder)
    node.running(waits)
    assert gpu_of(node.device(waits)) == gpu.lower()


def test_dra_health_reaches_the_pod(node: ClaimsNode) -> None:
    node.stop()
    node.start(QUIET)
    node.run(pod := share("ill", 10, 4))
    (gpu,) = node.daemons()

    def verdicts() -> list[tuple[str, str]]:
        (status,) = node.cluster.get("Pod", pod.name)["status"]["containerStatuses"]
        return [
            (each["health"], each.get("message", ""))
            for resource in status.get("allocatedResourcesStatus", ())
            for each in resource["resources"]
        ]

    node.until(lambda: [health for health, _ in verdicts()] == ["Healthy"], "the pod's device is healthy")
    node.rig.machine.xid(gpu, DOUBLE_BIT_ERROR)
    node.rig.machine.ecc_double(gpu)
    node.until(lambda: [health for health, _ in verdicts()] == ["Unhealthy"], "the pod's device is not")
    ((_, message),) = verdicts()
    assert message
    node.published(1)
    node.published(2)
    node.until(lambda: [health for health, _ in verdicts()] == ["Healthy"], "it is well again")


def test_two_doors_one_node(node: ClaimsNode) -> None:
    """Each GPU is offered by one door, and moves to the other one as between modes: it drains."""
    node.stop()
    layout = [{"gpus": [0], "mode": "dra"}, {"gpus": [1], "mode": "pgpu"}]
    node.start_with_layout("doors", layout)
    first, second = node.rig.gpu_uuids()
    node.call(node.rig.wait_allocatable, 1)
    assert {gpu_of(name) for name, each in node.devices().items() if not each.get("taints")} == {
        first.lower()
    }
    by_plugin, by_claim = gpu_pod("by-plugin", 1), whole("by-claim")
    node.run(by_plugin, by_claim)
    assert node.call(node.rig.held_ids, by_plugin, "main") == {second}
    assert gpu_of(node.device(by_claim)) == first.lower()
    waits = whole("waits")
    node.create(waits)
    node.waits(waits)
    node.label("pgpu")
    node.until(lambda: all(each.get("taints") for each in node.devices().values()), "the claims' GPU drains")
    assert node.cluster.allocatable(GPU) == 1
    node.delete(by_claim)
    node.call(node.rig.wait_allocatable, 2)
    node.delete(by_plugin)
    node.label("dra")
    node.call(node.rig.wait_allocatable, 0)
    node.running(waits)
    node.label(None)
    node.delete(waits)
    node.stop()
    node.start()


def test_dra_account_has_its_rights_only(served: tuple[ClaimsNode, ApiClient], node: ClaimsNode) -> None:
    """All tests of this file run under it; what else it might do is refused."""
    _, agent = served
    cluster = node.cluster
    slices, claims = (
        f"/apis/{RESOURCES}/resourceslices",
        f"/apis/{RESOURCES}/namespaces/default/resourceclaims",
    )
    own = node.slices()[0]

    def altered(name: str, **spec: Any) -> Object:
        kind = {"apiVersion": RESOURCES, "kind": "ResourceSlice", "metadata": {"name": name}}
        return {**kind, "spec": {**own["spec"], **spec}}

    pool = {**own["spec"]["pool"], "name": f"{DRIVER}/elsewhere"}
    for body, words in (
        (altered("x", nodeName="elsewhere"), "of that node only"),
        (altered("x", driver="gpu.example.com"), "of its own driver and pool only"),
        (altered("x", pool=pool), "of its own driver and pool only"),
    ):
        with pytest.raises(ApiError, match=words):
            agent.request("POST", slices, body)
    foreign = altered("foreign", nodeName="elsewhere", pool=pool)
    cluster.apply(foreign)
    stored = cluster.get("ResourceSlice", "foreign", api_version=RESOURCES)
    for method in ("PUT", "DELETE"):
        with pytest.raises(ApiError, match="of that node only"):
            agent.request(method, f"{slices}/foreign", stored if method == "PUT" else None)
    cluster.delete("ResourceSlice", "foreign", api_version=RESOURCES)
    node.run(pod := share("mine", 10, 4))
    (claim,) = cluster.find_all("ResourceClaim", api_version=RESOURCES)
    path = f"{claims}/{claim['metadata']['name']}"
    # Of no version: the agent itself writes conditions at about this time.
    bare = {"name": claim["metadata"]["name"], "namespace": "default"}
    with pytest.raises(ApiError, match="resourceclaims/binding"):
        agent.request("PUT", f"{path}/status", {**claim, "metadata": bare, "status": {}})
    others: tuple[tuple[str, str, Object | None], ...] = (
        ("PUT", path, claim),
        ("DELETE", path, None),
        ("POST", claims, {**claim, "metadata": {"name": "x"}}),
        ("GET", "/api/v1/namespaces/default/secrets", None),
        ("POST", f"/apis/{RESOURCES}/deviceclasses", {"metadata": {"name": "x"}, "spec": {}}),
        ("GET", f"/apis/{RESOURCES}/namespaces/default/resourceclaimtemplates", None),
    )
    for method, where, what in others:
        with pytest.raises(ApiError, match="cannot") as refusal:
            agent.request(method, where, what)
        assert refusal.value.status == 403
    agent_pod = f"/api/v1/namespaces/default/pods/{pod.name}"
    agent.merge_patch(agent_pod, {"metadata": {"annotations": {f"{DRIVER}/prepare-again": "1"}}})
    with pytest.raises(ApiError, match="only the annotations of a pod"):
        agent.merge_patch(agent_pod, {"metadata": {"annotations": {"example.com/a": "b"}}})
    assert cluster.find("Pod", "agent", namespace=NAMESPACE)


def test_dra_share_of_one_pod_takes_no_other_where_none_may_be_root(node: ClaimsNode) -> None:
    """`mps.rootPods` looks at a claim's first pod alone: one that names the claim later is kept from it."""
    cluster = node.cluster
    settings = ["dra.enabled=true", "mps.enabled=true", 'config.mps.rootPods="refuse"']
    rendered = helm.template(settings=settings, namespace=NAMESPACE)
    policies = [each for each in rendered if each["metadata"]["name"].endswith("-dra-shares-of-one-pod")]
    node.run(owner := share("owner", 10, 4))
    (claim,) = cluster.find_all("ResourceClaim", api_version=RESOURCES)
    name = claim["metadata"]["name"]
    path = f"/apis/{RESOURCES}/namespaces/default/resourceclaims/{name}"

    def refused() -> bool:
        found = cluster.api.get(path)
        found["status"]["reservedFor"].append({"resource": "pods", "name": "x", "uid": "x"})
        try:
            cluster.api.request("PUT", f"{path}/status?dryRun=All", found)
        except ApiError as error:
            return "config.mps.rootPods" in str(error)
        return False

    try:
        for each in policies:
            cluster.apply(each)
        node.until(refused, "the policy is in force")
        # Who may write claims may write their owners, too.
        orphaned = {"metadata": {"ownerReferences": None}}
        cluster.api.request("PATCH", path, orphaned, content_type="application/merge-patch+json")
        node.until(refused, "the policy asks nothing of owners")
        node.create(later := PodSpec("later", owner.containers, claims=(PodClaim("gpu", name),)))

        def said() -> bool:
            events = cluster.find_all("Event")
            mine = [each for each in events if each["involvedObject"]["name"] == later.name]
            return any("config.mps.rootPods" in each.get("message", "") for each in mine)

        node.until(said, "kube-scheduler says why")
        assert cluster.get("Pod", later.name)["status"]["phase"] == "Pending"
        node.delete(owner)  # what is there may still be taken away
        node.delete(later)
    finally:
        for each in reversed(policies):
            cluster.delete(each["kind"], each["metadata"]["name"], api_version=each["apiVersion"])
        cluster.delete(
            "ResourceClaim", name, api_version=RESOURCES
        )  # its owner does not take it along any more


BAD_CONFIGURATIONS = (
    ({"apiVersion": f"{DRIVER}/v2", "kind": "ShareConfiguration"}, "apiVersion"),
    ({"apiVersion": f"{DRIVER}/v1", "kind": "Other"}, "kind ShareConfiguration"),
    ({"apiVersion": f"{DRIVER}/v1", "kind": "ShareConfiguration", "priorty": "low"}, "no keys but priority"),
    ({"apiVersion": f"{DRIVER}/v1", "kind": "ShareConfiguration", "priority": "high"}, "normal or low"),
    ({"apiVersion": f"{DRIVER}/v1", "kind": "ShareConfiguration", "priority": 1}, "normal or low"),
)


def test_dra_configuration_is_refused_at_admission(node: ClaimsNode) -> None:
    def configured(**spec: Any) -> Object:
        made = template("configured", claim_of("mps", 10, 4))
        made["spec"]["spec"]["devices"] |= spec
        return made

    good = {"apiVersion": f"{DRIVER}/v1", "kind": "ShareConfiguration", "priority": "low"}
    other = {"opaque": {"driver": "gpu.example.com", "parameters": {"any": "thing"}}}
    accepted = [{"opaque": {"driver": DRIVER, "parameters": good}}, other]
    node.cluster.apply(configured(config=accepted))
    node.cluster.delete("ResourceClaimTemplate", "configured", api_version=RESOURCES)
    for parameters, words in BAD_CONFIGURATIONS:
        refused = configured(config=[{"opaque": {"driver": DRIVER, "parameters": parameters}}])
        with pytest.raises(ApiError, match=words):
            node.cluster.apply(refused)
        claim = {**refused, "kind": "ResourceClaim", "spec": refused["spec"]["spec"]}
        with pytest.raises(ApiError, match=words):
            node.cluster.apply(claim)
    two = template("configured", claim_of("mps", 10, 4, count=2))
    with pytest.raises(ApiError, match="is one share"):
        node.cluster.apply(two)
