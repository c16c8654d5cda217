"""Claims: the devices of ours that one has, and what is refused of it."""

from typing import Any

import msgspec
import pytest

from agent.dra.claims import (
    BadConfiguration,
    Bounds,
    ClaimRefused,
    ShareConfiguration,
    asked,
    check_containers,
    parse,
)
from agent.model.modes import SHARES, WHOLE_GPUS
from agent.model.pod import Pod
from agent.model.resource_claim import DRIVER, HeldClaim, ResourceClaim, device_name, pool_of

GPU, OTHER = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50", "GPU-6fd4f087-86f3-7a43-b711-4771313afc50"
POOL = pool_of("n1")
GPUS = {each.lower(): Bounds(each, 139) for each in (GPU, OTHER)}
CONFIGURATION = {"apiVersion": "gpu-node-agent.io/v1", "kind": "ShareConfiguration"}


def result(mode: Any = SHARES, gpu: str = GPU, **changes: Any) -> dict[str, Any]:
    found = {"request": "gpu", "driver": DRIVER, "pool": POOL, "device": device_name(gpu, mode)}
    if mode is SHARES:
        capacity = {"cores": "30", "memory": "8Gi", "clients": "1"}
        found |= {"shareID": "s-1", "consumedCapacity": capacity}  # type: ignore[dict-item]
    return {key: each for key, each in {**found, **changes}.items() if each is not None}


def claim(*results: Any, config: Any = (), uid: str = "u-1", allocated: bool = True) -> ResourceClaim:
    status = {"allocation": {"devices": {"results": results, "config": config}}} if allocated else {}
    document = {"metadata": {"name": "c", "namespace": "ns", "uid": uid}, "status": status}
    return msgspec.json.decode(msgspec.json.encode(document), type=ResourceClaim)


def held(*results: Any, name: str = "c", **more: Any) -> HeldClaim:
    found = asked(claim(*results, **more), "u-1", POOL, GPUS)
    return HeldClaim(f"u-{name}", "ns", name, found.devices)


def test_shares_and_whole_gpus_are_read() -> None:
    found = held(result(), result(WHOLE_GPUS, OTHER, request="all"), {"driver": "other", "device": "x"})
    share, whole = (each.share for each in found.devices)
    assert (share.gpu, share.mode, share.cores, share.memory, share.share_id) == (GPU, SHARES, 30, 8, "s-1")
    assert (whole.gpu, whole.mode, whole.cores) == (OTHER, WHOLE_GPUS, 0)
    assert found.gpus == {GPU, OTHER}


def capacity(**changes: str) -> dict[str, str]:
    return {"cores": "30", "memory": "8Gi", "clients": "1", **changes}


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (claim(result(), uid="u-2"), "another one"),
        (claim(allocated=False), "not allocated"),
        (claim(), "no device of driver"),
        (claim({"driver": "other.example.com", "device": "gpu-0"}), "no device of driver"),
        (claim(result(pool="gpu-node-agent.io/n2")), "this node does not have"),
        (claim(result(device="gpu-0-frac")), "this node does not have"),
        (claim(result(device="../../etc-mps")), "this node does not have"),
        (claim(result(adminAccess=True)), "adminAccess"),
        (claim(result(shareID=None)), "cores, 8Gi"),
        (claim(result(consumedCapacity=None)), "DRAConsumableCapacity"),
        (claim(result(consumedCapacity=capacity(cores="0"))), "a share is"),
        (claim(result(consumedCapacity=capacity(cores="101"))), "a share is"),
        (claim(result(consumedCapacity=capacity(cores="1500m"))), "DRAConsumableCapacity"),
        (claim(result(consumedCapacity=capacity(memory="1536Mi"))), "a share is"),
        (claim(result(consumedCapacity=capacity(memory="140Gi"))), "a share is"),
        (claim(result(consumedCapacity=capacity(memory="lots"))), "DRAConsumableCapacity"),
        (claim(result(consumedCapacity=capacity(clients="2"))), "a share is"),
        (claim(result(WHOLE_GPUS, shareID="s")), "no shares"),
        (claim(result(WHOLE_GPUS), result(WHOLE_GPUS)), "twice"),
    ],
)
def test_a_bad_claim_is_refused(made: ResourceClaim, word: str) -> None:
    with pytest.raises(ClaimRefused, match=word):
        asked(made, "u-1", POOL, GPUS)


def opaque(parameters: Any, driver: str = DRIVER, **more: Any) -> dict[str, Any]:
    return {"opaque": {"driver": driver, "parameters": parameters}, **more}


def test_the_last_configuration_of_a_request_counts() -> None:
    low, normal = ({**CONFIGURATION, "priority": word} for word in ("low", "normal"))
    chosen = [opaque(normal), opaque({"any": "thing"}, "other"), opaque(low, requests=["gpu"])]
    (device,) = held(result(), config=chosen).devices
    assert device.share.low_priority
    chosen.append(opaque({"wrong": 1}, requests=["another"]))
    assert held(result(request="gpu/sub"), config=chosen).devices[0].share.low_priority


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        [],
        {},
        {"apiVersion": "gpu-node-agent.io/v2", "kind": "ShareConfiguration"},
        {"apiVersion": "gpu-node-agent.io/v1", "kind": "GpuConfig"},
        {**CONFIGURATION, "priority": "high"},
        {**CONFIGURATION, "priority": None},
        {**CONFIGURATION, "placement": "spread"},
        {**CONFIGURATION, "unknown": True},
        {**CONFIGURATION, "apiVersion": {"a": "b" * 10_000}},
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(parameters: Any) -> None:
    with pytest.raises(BadConfiguration) as caught:
        parse(parameters)
    assert len(str(caught.value)) < 500
    with pytest.raises(ClaimRefused, match="not understood"):
        held(result(), config=[opaque(parameters)])


def test_a_configuration_is_read() -> None:
    assert parse(CONFIGURATION) == ShareConfiguration()
    assert parse({**CONFIGURATION, "placement": "binpack", "priority": "low"}).priority == "low"


def pod(*containers: list[dict[str, str]], **names: str) -> Pod:
    document = {
        "metadata": {"name": "p", "namespace": "ns", "uid": "p-1"},
        "spec": {
            "containers": [
                {"name": f"c{at}", "resources": {"claims": claims}} for at, claims in enumerate(containers)
            ],
            "resourceClaims": [{"name": each} for each in names],
        },
        "status": {
            "resourceClaimStatuses": [
                {"name": each, "resourceClaimName": name} for each, name in names.items()
            ]
        },
    }
    return msgspec.json.decode(msgspec.json.encode(document), type=Pod)


@pytest.mark.parametrize(
    ("claims", "made", "refused"),
    [
        ([held(result())], pod([{"name": "a"}], a="c"), False),
        ([held(result(), result(gpu=OTHER))], pod([{"name": "a"}], a="c"), True),
        ([held(result(), result(WHOLE_GPUS, OTHER))], pod([{"name": "a"}], a="c"), True),
        ([held(result(WHOLE_GPUS), result(WHOLE_GPUS, OTHER))], pod([{"name": "a"}], a="c"), False),
        ([held(result()), held(result(), name="d")], pod([{"name": "a"}, {"name": "b"}], a="c", b="d"), True),
        (
            [held(result()), held(result(), name="d")],
            pod([{"name": "a"}], [{"name": "b"}], a="c", b="d"),
            False,
        ),
        (
            [held(result(), result(gpu=OTHER, request="two"))],
            pod([{"name": "a", "request": "gpu"}], [{"name": "a", "request": "two"}], a="c"),
            False,
        ),
    ],
)
def test_a_container_has_one_share_or_whole_gpus(claims: list[HeldClaim], made: Pod, refused: bool) -> None:
    if refused:
        with pytest.raises(ClaimRefused, match="one share for a container"):
            check_containers(made, claims)
    else:
        check_containers(made, claims)
