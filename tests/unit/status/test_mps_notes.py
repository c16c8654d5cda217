"""What `status` says of a GPU's MPS daemon."""

from typing import Any

from agent.status.table import _mps_notes

QUIET: dict[str, Any] = {
    "state": "serving",
    "reason": "",
    "podsWithoutClient": [],
    "podsWithManyClients": [],
    "rootPods": [],
}


def test_nothing_is_said_of_what_is_well() -> None:
    assert list(_mps_notes(None)) == []
    assert list(_mps_notes(QUIET)) == []


def test_daemon_and_pods_that_need_somebody_are_named() -> None:
    told = list(
        _mps_notes(
            QUIET
            | {
                "state": "fault",
                "reason": "a client's fatal error: Server is handling a fatal GPU error.",
                "podsWithoutClient": ["a/silent"],
                "podsWithManyClients": ["a/crowd"],
                "rootPods": ["a/root"],
            }
        )
    )
    assert told[0] == "its MPS daemon is fault: a client's fatal error: Server is handling a fatal GPU error."
    assert ["a/silent" in told[1], "a/crowd" in told[2], "a/root" in told[3]] == [True] * 3
    assert "each of them may use the pod's whole share" in told[2]
