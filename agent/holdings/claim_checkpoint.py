"""The kubelet's own record of claims on its node: from before it has them prepared until they are unprepared.

It outlives pods that were deleted by force, of which PodResources says nothing any more while their
containers still run. Layout: kubelet 1.36 and 1.37, `pkg/kubelet/cm/dra/state`.
"""

from pathlib import Path

import msgspec

from agent.model.resource_claim import DRIVER, AskedDevice, HeldClaim, share_of

FILE_NAME = "dra_manager_state"


class ClaimsUnreadable(Exception):
    """There is a record, and it cannot be read or understood; the text names it and says why."""


class _Device(msgspec.Struct):
    pool: str = msgspec.field(name="PoolName", default="")
    device: str = msgspec.field(name="DeviceName", default="")
    requests: list[str] | None = msgspec.field(name="RequestNames", default=None)
    cdi: list[str] | None = msgspec.field(name="CDIDeviceIDs", default=None)
    share_id: str | None = msgspec.field(name="ShareID", default=None)


class _Driver(msgspec.Struct):
    devices: list[_Device] | None = msgspec.field(name="Devices", default=None)


class _Claim(msgspec.Struct):
    uid: str = msgspec.field(name="ClaimUID")
    name: str = msgspec.field(name="ClaimName", default="")
    namespace: str = msgspec.field(name="Namespace", default="")
    drivers: dict[str, _Driver] | None = msgspec.field(name="DriverState", default=None)


class _Data(msgspec.Struct):
    claims: list[_Claim] | None = msgspec.field(name="ClaimInfoStateList", default=None)


class _File(msgspec.Struct):
    data: str = msgspec.field(name="Data")


def read(root: Path) -> dict[str, HeldClaim] | None:
    """Claims with devices of ours, by UID; None where there is no file. Blocks. Raises ClaimsUnreadable.

    One without devices is being prepared: they are written down once all drivers of the pod have answered.
    """
    file = root / FILE_NAME
    try:
        content = msgspec.json.decode(file.read_bytes(), type=_File)
        claims = msgspec.json.decode(content.data, type=_Data).claims or []
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClaimsUnreadable(f"the kubelet's record of claims {file} is not readable: {error}") from error
    found = {}
    for claim in claims:
        ours = (claim.drivers or {}).get(DRIVER)
        if ours is None:
            continue
        devices = [
            AskedDevice(next(iter(each.requests or ()), ""), each.pool, each.device, share)
            for each in ours.devices or ()
            if (share := share_of(each.device, each.cdi or (), claim.name, each.share_id or ""))
        ]
        found[claim.uid] = HeldClaim(claim.uid, claim.namespace, claim.name, tuple(devices))
    return found
