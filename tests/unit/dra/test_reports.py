"""Reports on claims: which conditions are written."""

from types import SimpleNamespace
from typing import Any

import msgspec

from agent.dra.reports import MOST_TOLD, ClusterClaimReports
from agent.kubelet.claim_service import ClaimName
from agent.model.resource_claim import ResourceClaim


async def test_refused_claims_that_are_gone_are_forgotten() -> None:
    """Nobody prepares most of them later: their pods are deleted."""
    events: Any = SimpleNamespace(emit=lambda _: None)
    reports = ClusterClaimReports(None, events)  # type: ignore[arg-type]
    claim = msgspec.json.decode(b'{"metadata": {}}', type=ResourceClaim)
    names = [ClaimName("ns", f"uid-{number}", f"claim-{number}") for number in range(5000)]
    for name in names:
        reports.refused(name, claim, "no")
    assert len(reports._told) == MOST_TOLD <= 1024
    for name, told in ((names[0], False), (names[-1], True), (names[-1], False)):
        before = reports._conditions.depth + reports._conditions.dropped
        reports.prepared(name, claim)
        assert reports._conditions.depth + reports._conditions.dropped == before + told
