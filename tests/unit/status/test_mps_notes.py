"""A GPU's MPS daemon in `status`."""

from typing import Any

from agent.status.table import _mps_notes

QUIET: dict[str, Any] = {
    "state": "serving",
    "reason": "",
    "podsWithoutClient": [],
    "podsWithManyClients": [],
    "podsAboveCap": [],
    "podsOfOtherUsers": [],
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
                "podsAboveCap": ["a/greedy"],
                "podsOfOtherUsers": ["a/mine (user 1)", "a/theirs (user 2)"],
                "rootPods": ["a/root"],
            }
        )
    )
    assert told[0] == "its MPS daemon is fault: a client's fatal error: Server is handling a fatal GPU error."
    pods = ("a/silent", "a/crowd", "a/greedy", "a/mine (user 1), a/theirs (user 2)", "a/root")
    assert [pod in line for pod, line in zip(pods, told[1:], strict=True)] == [True] * 5
    assert "each of them may use the pod's whole share" in told[2]
