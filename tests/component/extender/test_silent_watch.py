"""A watch of bound pods that is open and brings nothing: what was bound stays bound."""

from typing import Any

import anyio
import pytest

from agent.extender import ledger_sync
from tests.component.extender.api import ClusterApi, gpus
from tests.component.extender.replicas import leader

ASSUME_SECONDS = 30


async def test_silent_watch_sells_nothing_twice() -> None:
    api = ClusterApi()
    api.node("a", *gpus(2))
    async with api.serving(), leader(api, assumeSeconds=ASSUME_SECONDS) as scheduler:
        api.bound_shown.publish(False)
        confirmed, lost, third = (api.pod(name, 60, 10) for name in ("confirmed", "lost", "third"))
        assert await scheduler.bind(confirmed, "a") == ""
        api.lose_answers = True
        assert "the answer was lost" in await scheduler.bind(lost, "a")
        api.lose_answers = False
        sync = scheduler.extender.sync
        assert sync is not None
        for looks in range(3):  # some seconds after their time is over
            sync._let_go(anyio.current_time() + ASSUME_SECONDS + looks * ledger_sync.EXPIRY_SECONDS)
        assert (await scheduler.get("/serving"))[0] == 200
        # Both GPUs are held, at the API server, by pods that the extender has not seen.
        assert (await scheduler.filter(third, ["a"]))["FailedNodes"] == {
            "a": "largest free share 40 of 60 cores"
        }
        assert "no room any more" in await scheduler.bind(third, "a")
        api.bound_shown.publish(True)
        await scheduler.settled()
        api.end("confirmed")
        with anyio.fail_after(5):
            while await scheduler.bind(third, "a"):
                await anyio.sleep(0.05)
    used = [pod["metadata"]["annotations"]["tencent.com/predicate-gpu-idx-0"] for pod in api.pods.values()]
    assert sorted(used) == ["0", "1"]


async def test_a_binding_that_is_never_shown_is_looked_up_in_a_new_list(
    monkeypatch: pytest.MonkeyPatch, logs: Any
) -> None:
    api = ClusterApi()
    api.node("a", *gpus(1))
    async with api.serving(), leader(api) as scheduler:
        tell = api._tell
        monkeypatch.setattr(api, "_tell", lambda *_: None)  # the watch brings nothing any more
        first, second = api.pod("first", 60, 10), api.pod("second", 60, 10)
        assert await scheduler.bind(first, "a") == ""
        api.end("first")
        assert "no room any more" in await scheduler.bind(second, "a")
        monkeypatch.setattr(ledger_sync, "UNSHOWN_SECONDS", 0.5)
        with anyio.fail_after(10):
            while await scheduler.bind(second, "a"):
                await anyio.sleep(0.05)
        monkeypatch.setattr(api, "_tell", tell)
    assert "binding_not_shown" in {each["event"] for each in logs}
