"""The table of the extender's times: each outlasts the one above it, or GPUs that are held are let go."""

import itertools

import msgspec
import pytest

from agent.cluster import api, reflector
from agent.extender import gangs, ledger_sync
from agent.extender.settings import BIND_SECONDS, DEAD_WATCH_SECONDS, UNSHOWN_SECONDS, ExtenderSettings, load
from agent.kit.configuration import ConfigurationError

BOOKMARK = 60.0  # of an API server, about; Kubernetes API concepts, watch bookmarks


def test_times_keep_their_order() -> None:
    settings = ExtenderSettings()
    idle, interval, count = api.KEEP_ALIVE.values()
    table = {
        "a member's GPUs after it has left the watch": gangs.LEFT_SECONDS,
        "a Binding's answer": BIND_SECONDS,
        "between losing and giving up a lease": settings.lease.duration_seconds
        - settings.lease.renew_seconds,
        "a choice without an answer": settings.assume_seconds,
        "a dead connection is found": float(idle + interval * count),
        "a bookmark": BOOKMARK,
        "a silent watch is opened again": reflector.SILENCE_SECONDS,
        "a binding that is not shown gets a new list": UNSHOWN_SECONDS,
        "a dead watch ends the answers": DEAD_WATCH_SECONDS,
    }
    for (first, shorter), (second, longer) in itertools.pairwise(table.items()):
        assert shorter < longer, f"{first} ({shorter:g} s) must end before: {second} ({longer:g} s)"
    # Between two looks a watch that was opened again reads what it had missed.
    assert ledger_sync.EXPIRY_SECONDS < UNSHOWN_SECONDS - reflector.SILENCE_SECONDS


def test_no_setting_breaks_the_order() -> None:
    with pytest.raises(ConfigurationError, match="assumeSeconds"):
        load(None, {}, [f"assumeSeconds={BIND_SECONDS:g}"])
    assert msgspec.to_builtins(load(None, {}, ["assumeSeconds=600"]))["assumeSeconds"] == 600
