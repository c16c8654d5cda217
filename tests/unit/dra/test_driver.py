"""Preparing claims: those that had devices before the agent, or the node, started."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, cast

import anyio
import msgspec
import pytest

from agent.cluster.api import ApiRefused, KubeApi
from agent.dra.claims import asked
from agent.dra.driver import ClaimPreparer, ClaimReports
from agent.dra.ledger import ClaimLedger
from agent.inventory.snapshot import GpuState, Snapshot
from agent.kit.tasks import Cell
from agent.kubelet.claim_service import ClaimName
from agent.model.gpu import Gpu
from agent.model.holding import Holder
from agent.model.modes import SHARES, WHOLE_GPUS, Assignment, GpuMode
from agent.model.pod import Pod
from agent.model.resource_claim import HeldClaim
from agent.modes.desired import ClaimRequests
from agent.modes.planner import STARTING
from agent.pairing.pod_source import PodSource
from tests.unit.dra.test_claims import GPU, GPUS, POOL, claim, result
from tests.virtual_time import in_virtual_time

NAME = ClaimName("ns", "u-1", "c")


class Pods(PodSource):
    """Pod `p` uses the claim in its container `main`."""

    def pods_on_node(self) -> Collection[Pod]:
        document = {
            "metadata": {"name": "p", "namespace": "ns", "uid": "p-1"},
            "spec": {
                "nodeName": "n1",
                "containers": [{"name": "main", "resources": {"claims": [{"name": "gpu"}]}}],
                "resourceClaims": [{"name": "gpu"}],
            },
            "status": {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "c"}]},
        }
        return [msgspec.json.decode(msgspec.json.encode(document), type=Pod)]


class Api:
    """The API server; `uid` is the claim's, empty: there is none."""

    def __init__(self, uid: str, owner: str = "Pod", users: Sequence[str] = ("p",)) -> None:
        self.uid = uid
        self.owner = owner
        self.users = users
        self.up = anyio.Event()
        self.up.set()

    async def get(self, path: str, deadline: float) -> bytes:
        await self.up.wait()
        assert path.endswith("/namespaces/ns/resourceclaims/c")
        if not self.uid:
            raise ApiRefused(404, "not found")
        owners = [{"apiVersion": "v1", "kind": self.owner, "name": "p", "uid": "p-1"}]
        metadata = {"name": "c", "namespace": "ns", "uid": self.uid, "ownerReferences": owners}
        reserved = [{"resource": "pods", "name": each, "uid": f"{each}-1"} for each in self.users]
        status = {"reservedFor": reserved, "allocation": {"devices": {"results": [result()]}}}
        return msgspec.json.encode({"metadata": metadata, "status": status})


class AskedWing:
    """Remembers for whom devices are asked."""

    def __init__(self) -> None:
        self.holders: list[Holder] = []
        self.owned: list[bool] = []

    def claimed(self, share: Any, holders: Sequence[Holder], *, owned: bool) -> Sequence[str]:
        self.holders += holders
        self.owned.append(owned)
        return ("x/y=z",)


def preparer(api: Api, wing: AskedWing) -> tuple[ClaimPreparer, ClaimLedger]:
    """One whose GPU serves shares to claims."""
    state = GpuState(Gpu(GPU, 0, 0, "0000:01:00.0", "NVIDIA H200", 143771 << 20, (9, 0)))
    ledger = ClaimLedger(ClaimRequests(), lambda _: (139, 48))
    wings: Mapping[Any, Any] = {SHARES: wing}
    made = ClaimPreparer(
        "n1",
        cast("KubeApi", api),
        Pods(),
        wings,
        Cell(Snapshot(gpus=(state,), by_uuid={GPU: state})),
        Cell(Assignment({GPU: GpuMode(SHARES, dra=True)})),
        Cell(STARTING),
        ledger,
        ClaimReports(),
    )
    return made, ledger


@pytest.mark.parametrize(("uid", "known"), [("u-1", True), ("u-2", False), ("", False)])
async def test_for_whom_a_claim_of_before_is_gets_known_again(uid: str, known: bool) -> None:
    """After a reboot the kubelet prepares again; whose claim it is may decide (`mps.rootPods: refuse`).

    A namesake says nothing of it, and one that cannot be read keeps its devices all the same.
    """
    wing = AskedWing()
    driver, ledger = preparer(Api(uid), wing)
    ledger.read({NAME.uid: asked(claim(result()), NAME.uid, POOL, GPUS)}, monotonic())
    answers = await driver.prepare([NAME])
    assert not isinstance(answers[NAME.uid], str)
    assert wing.holders == ([Holder("ns", "p", "main")] if known else [])


@pytest.mark.parametrize(
    ("owner", "users", "owned"),
    [("Pod", ["p"], True), ("Job", ["p"], False), ("Pod", ["p", "q"], False), ("Pod", ["q"], False)],
)
async def test_wing_knows_whether_a_claim_is_one_pods_alone(
    owner: str, users: list[str], owned: bool
) -> None:
    wing = AskedWing()
    driver, ledger = preparer(Api("u-1", owner, users), wing)
    ledger.read({NAME.uid: asked(claim(result()), NAME.uid, POOL, GPUS)}, monotonic())
    await driver.prepare([NAME])
    assert wing.owned == [owned]


@pytest.mark.parametrize("waits_for", ["API server", "GPU"])
@pytest.mark.parametrize("ended", [True, False])
@in_virtual_time
async def test_a_claim_that_is_given_back_while_it_is_prepared_holds_nothing(
    waits_for: str, ended: bool
) -> None:
    """As of a pod that is deleted meanwhile: nobody gives it back once more.

    The kubelet has ended its call, too, which may be about to go on.
    """
    api = Api("u-1")
    driver, ledger = preparer(api, AskedWing())
    other = HeldClaim("u-0", "ns", "other", asked(claim(result(WHOLE_GPUS)), NAME.uid, POOL, GPUS).devices)
    if waits_for == "GPU":
        ledger.read({other.uid: other}, monotonic())
    else:
        api.up = anyio.Event()
    asking = asyncio.create_task(driver.prepare([NAME]))
    await anyio.sleep(0.1)
    if ended:
        asking.cancel()
    await driver.unprepare([ClaimName("ns", other.uid, "other")])
    await driver.unprepare([NAME])
    api.up.set()
    with suppress(asyncio.CancelledError):
        assert (await asking)[NAME.uid] == "claim ns/c was given back while it was prepared"
    assert not ledger.held.value
    assert not ledger.unanswered
