"""`gpu-node-agent cordon`: whom it waits for, and whether anybody can say so."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.cli import output, status
from agent.web import control

GPU = "GPU-00000000-0000-0000-0000-000000000001"
OLD = "the kubelet does not say now which pods are on it, this is {} s old"
OPTIONS = argparse.Namespace(gpu="0", reason=None, watch=True, output=None)


def cordoned(pods: list[str] | None, age: float | None = None) -> Mapping[str, object]:
    return {"uuid": GPU, "index": 0, "waitingFor": pods, "holdersAgeSeconds": age}


def reported(*pods: str, known: bool = True, age: float | None = None) -> Mapping[str, object]:
    gpus = [{"uuid": GPU, "holders": [{"pod": pod} for pod in pods]}, {"uuid": "another", "holders": [{}]}]
    return {"gpus": gpus, "holdersKnown": known, "holdersAgeSeconds": age}


def test_a_cordon_is_watched_until_the_kubelet_says_that_nobody_holds_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names nobody before its first answer, and while it is away: neither is the end."""
    reports = [
        reported(known=False),
        reported("ml/a"),
        reported("ml/a", age=7.0),
        reported(age=9.0),
        reported(),
    ]
    left = iter(reports)
    monkeypatch.setattr(output, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(
        control, "ask", lambda _, command, **__: cordoned(None) if command == "cordon" else next(left)
    )
    assert status._cordon(Path("control.sock"), OPTIONS) == 0
    assert next(left, None) is None
    shown = [line.partition("; ")[2] for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        "which pods are on it is not known: the kubelet has not said so yet",
        "pods on it go on until they end: ml/a",
        f"pods on it go on until they end: ml/a; {OLD.format(7)}",
        OLD.format(9),
        "",
    ]
