"""Text in the cluster's objects: labels of the node, layouts' names, annotations of pods and nodes."""

import json

import msgspec

from agent.extender.fleet import Fleet, LedgerNode
from agent.extender.objects import read_node, read_pod
from agent.extender.pod_demand import pod_demand
from agent.model.holding import Holder, Holding, Ledger, PairHoldings, UnitPool
from agent.model.modes import FOREIGN_VALUES, BadDeviceId, Mode, parse
from agent.model.node_inventory import INVENTORY, BadInventory, Entry, GpuEntry, NodeInventory, decode, encode
from agent.model.placement import (
    ASSIGNED,
    HINT,
    HINT_NODE,
    HINT_TIME,
    POLICY,
    NoRoom,
    PlacementPolicy,
    hint_of,
    place,
    policy_of,
)
from agent.model.pod import MPS, VGPU, Container, Demand, Pod
from agent.modes.desired import FOREIGN_LABELS, LABEL, NOTHING, ModeCatalog
from agent.modes.planner import decide
from tests.fuzz.campaign import Campaign
from tests.pods import a_pod
from tests.unit.modes.nodes import gpu, snapshot_of

LAYOUTS = {
    "half": (Entry(("0-1",), Mode.VGPU), Entry(("rest",), Mode.PGPU)),
    "sliced": (Entry(("rest",), Mode.PGPU, 4),),
    "elsewhere": (Entry(("7",), Mode.PGPU),),  # this node has no such GPU
}
WORDS = ModeCatalog(LAYOUTS, (Mode.PGPU, Mode.VGPU, Mode.MPS), "none")
MEANT = {*WORDS.values, "enable", *NOTHING, *FOREIGN_VALUES}


def test_mode_labels(campaign: Campaign) -> None:
    snapshot = snapshot_of(*(gpu(index) for index in range(4)))
    standing = WORDS.named("half", "")
    offered = decide(snapshot, standing, None).targets

    def act(data: bytes) -> str:
        key, _, value = data.decode(errors="replace").partition("=")
        desired = WORDS.of_labels({key: value, "kubernetes.io/os": "linux"})
        plan = decide(snapshot, desired, standing)
        if key != LABEL and (key, value) not in FOREIGN_LABELS:
            assert desired == WORDS.of_labels({})
            return "another label"
        if (value in MEANT or key != LABEL) and value != "elsewhere":
            assert plan.obeys
            return "a mode"
        assert desired.problem or plan.problem
        assert not plan.obeys
        assert plan.targets == offered
        return "nothing changes"

    samples = [f"{LABEL}={value}".encode() for value in (*sorted(MEANT), *LAYOUTS, "vgpus", "")]
    samples += [f"{key}={value}".encode() for key, value in FOREIGN_LABELS]
    # Most of them keep the key: what follows it is what matters.
    campaign.run(
        lambda data: act(data if data.startswith(b"gpu=") else LABEL.encode() + b"=" + data[-60:]),
        [sample.partition(b"=")[2] for sample in samples[:-1]] + samples[-1:],
        (b"mps", b"vgpu", b"pgpu", b"half", b"-", b" "),
    )


def test_pod_annotations(campaign: Campaign) -> None:
    pools = {f"GPU-{index}": UnitPool.of(VGPU, f"GPU-{index}", index, 8 << 30) for index in range(4)}
    taken = Holding("ns", "other", "main", VGPU.core, pools["GPU-2"].cores[:90])
    rooms = Ledger(pools, PairHoldings((taken,))).free_gpus(Holder("ns", "p", "main"), taken.id_set)
    demand = Demand(20, 4)

    def act(data: bytes) -> str:
        fields = [part.decode(errors="replace") for part in data.split(b";")]
        annotations = dict(zip((f"{HINT}0", HINT_NODE, ASSIGNED, POLICY, HINT_TIME), fields, strict=False))
        pod = a_pod("ns", "p", (Container("main", {VGPU.core: 20, VGPU.memory: 4}),), annotations=annotations)
        hint, policy = hint_of(pod, "main", "node"), policy_of(pod, PlacementPolicy.BINPACK)
        choice = place(rooms, demand, policy, hint)
        (chosen,) = choice.gpus
        assert rooms[chosen].fits(demand), "a GPU without room was chosen"
        try:
            place(rooms, Demand(200, 0, whole=2), policy, hint)
        except NoRoom:
            return "no room"
        return "ignored" if choice.hint_ignored else "followed" if hint else "no hint"

    campaign.run(
        act,
        (
            b"0;node;false;binpack;1",
            b"2;node;false;spread;2",
            b"0,1,2;;true;fragmentation;3",
            b"3;other;;;",
            b";;;;",
        ),
        (b",", b";", b" 1", b"-", b"0000"),
    )


def _pod(**annotations: str) -> bytes:
    limits = {VGPU.core: "20", VGPU.memory: "4"}
    return json.dumps(
        {
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", "annotations": annotations},
            "spec": {
                "nodeName": "a",
                "containers": [{"name": "main", "resources": {"limits": limits}}],
                "initContainers": [{"name": "init", "resources": {"limits": {MPS.core: "1k"}}}],
            },
            "status": {
                "phase": "Running",
                "containerStatuses": [
                    {
                        "name": "main",
                        "allocatedResourcesStatus": [
                            {"name": VGPU.core, "resources": [{"resourceID": "GPU-0::c1"}]}
                        ],
                    }
                ],
            },
        }
    ).encode()


def test_pods_of_the_api_server(campaign: Campaign) -> None:
    def act(data: bytes) -> str:
        outcome = "read"
        try:
            pod = msgspec.json.decode(data, type=Pod)
            assert isinstance(pod.pending, bool)
            assert pod.lacks(frozenset({VGPU.core}), frozenset()) in (True, False)
            for container in pod.spec.containers:
                pod.may_run_as_root(container.name)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            outcome = "refused"
        try:
            read_pod(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            outcome = "refused"
        return outcome

    tokens = (b'"limits":{', b'"1k"', b'"1e3"', b'"Ki"', b"::c", b"::m", HINT.encode(), b"-1")
    campaign.run(
        act, (_pod(), _pod(**{f"{HINT}0": "1", ASSIGNED: "true"}), _pod(**{POLICY: "spread"})), tokens
    )


def test_node_inventories(campaign: Campaign) -> None:
    good = NodeInventory(
        tuple(GpuEntry(f"GPU-{n}", n, Mode.VGPU, 81920) for n in range(4)), (1, 2, 3, 4, 5, 6)
    )
    fleet = Fleet()
    fleet.set_node(LedgerNode("honest", good, {}))
    model = a_pod("ns", "p", (Container("main", {VGPU.core: 20, VGPU.memory: 4}),), uid="u")
    wanted = pod_demand(model)
    before = fleet.verdict("honest", wanted), fleet.allocated()

    def act(data: bytes) -> str:
        text = data.decode(errors="replace")
        try:
            found = decode(text)
        except BadInventory:
            found = None
        if found is not None:
            again = decode(encode(found))
            assert [each.uuid for each in again.gpus] == [each.uuid for each in found.gpus]
        raw = json.dumps(
            {"metadata": {"name": "liar", "uid": "u", "annotations": {INVENTORY: text}}}
        ).encode()
        _, facts = read_node(raw)
        assert (facts.inventory is None) == (found is None)
        fleet.set_node(LedgerNode("liar", facts.inventory, facts.totals))
        fleet.verdict("liar", wanted)
        picked = fleet.pick("liar", wanted, PlacementPolicy.FRAGMENTATION)
        fleet.drop_node("liar")
        assert (fleet.verdict("honest", wanted), fleet.allocated()) == before
        return "refused" if found is None else "no room" if picked is None else "room"

    samples = (
        encode(good),
        encode(NodeInventory(good.gpus[:2])),
        encode(NodeInventory((GpuEntry("GPU-9", 9, Mode.MPS, 40960, False, "Xid 79", 1, 48),))),
        encode(NodeInventory((GpuEntry("GPU-9", 9, Mode.PGPU, 40960, replicas=4),))),
    )
    campaign.run(
        act, [each.encode() for each in samples], (b'"u":', b'"links":', b'"m":"vgpu"', b'"mem":', b'"v":2')
    )


def test_device_ids(campaign: Campaign) -> None:
    def act(data: bytes) -> str:
        text = data.decode(errors="replace")
        try:
            found = parse(text)
        except BadDeviceId:
            return "refused"
        assert text.startswith(found.gpu)
        return "read"

    campaign.run(
        act, (b"GPU-1::c17", b"GPU-1::m42", b"GPU-1", b"GPU-1::sc3", b"GPU-1::r2"), (b"::c", b"::sm")
    )
