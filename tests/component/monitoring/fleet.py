"""500 nodes with eight GPUs over 30 days, made up for the real Prometheus, and a board opened on them."""

import json
import math
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from tests.component.monitoring import queries
from tests.component.monitoring.prometheus import Prometheus
from tests.prometheus_binaries import programs

NODES, GPUS, OWNERS = 500, 8, 300
DAYS, DAY, MINUTE = 30, 86400, 60
MODES = ("pgpu", "vgpu", "mps")
# A browser asks so much at once, and for so many points in a panel.
AT_ONCE, POINTS = 6, 1000
# Series by their level: what a panel may draw over a month is there by the minute, the rest in six hours.
OFTEN, SELDOM = MINUTE, DAY // 4
Value = Callable[[int, random.Random], float]


def _series() -> Iterator[tuple[str, Sequence[Mapping[str, str]], int, Value]]:
    """Metric, label sets, how often, and its value by the series' number."""
    nodes = [{"node": f"gpu-{number:03}"} for number in range(NODES)]
    by_mode = [{"mode": mode} for mode in MODES]
    owners = [{"namespace": f"team-{n % 40}", "owner": f"Deployment/app-{n}"} for n in range(OWNERS)]
    all_gpus = NODES * GPUS
    yield "cluster:gpu_agent_gpus:count", [{}], OFTEN, lambda _, __: all_gpus
    yield "cluster:gpu_agent_healthy_gpus:sum", [{}], OFTEN, lambda _, dice: all_gpus - dice.randrange(9)
    for name, part in (("held:sum", 0.9), ("utilization:sum", 0.5), ("idle:sum", 0.4)):
        yield f"cluster:gpu_agent_{name}", [{}], OFTEN, _about(part * all_gpus)
    for name in ("free_gpus:sum", "free_compute_gpus:sum", "unusable_compute_gpus:sum"):
        yield f"mode:gpu_agent_{name}", by_mode, OFTEN, _about(50)
    yield "mode:gpu_agent_largest_free_ratio:max", by_mode, OFTEN, lambda _, dice: dice.random()
    yield "node:gpu_agent_gpus:count", nodes, SELDOM, lambda _, __: GPUS
    yield "node:gpu_agent_healthy_gpus:sum", nodes, SELDOM, lambda n, _: GPUS - (n % 50 == 0)
    yield "node:gpu_agent_expected:last", nodes, SELDOM, lambda _, __: 1
    yield "gpu_agent_ready", nodes[1:], SELDOM, lambda _, __: 1
    for name in ("held:sum", "idle:sum"):
        yield f"node:gpu_agent_{name}", nodes, SELDOM, _about(4)
    yield "node:gpu_agent_utilization:mean5m", nodes, SELDOM, lambda _, dice: dice.random()
    states = [{**node, "state": state} for node in nodes for state in ("applied", "switching")]
    yield "gpu_agent_mode_state", states, SELDOM, lambda n, _: float(n % 2 == (n % 250 == 1))
    gpus = [{**node, "gpu": f"{node['node']}-{n}", "index": str(n)} for node in nodes for n in range(GPUS)]
    yield "gpu:gpu_agent_utilization:mean5m", gpus, DAY, lambda _, dice: dice.random()
    sick = [{**gpu, "xid": "79", "class": "hardware"} for gpu in gpus[::100]]
    yield "gpu_agent_gpu_last_xid_timestamp_seconds", sick, DAY, lambda _, __: time.time() - 3600
    yield "namespace_owner:gpu_agent_idle:sum", owners, SELDOM, _about(5)
    month = [{**owner, "month": "202611"} for owner in owners]
    for what in ("held", "used", "idle"):
        yield f"namespace_owner_month:gpu_hours_{what}:sum", month, SELDOM, _about(300)
    yield "cluster:gpu_agent_month:info", [{"month": "202611"}], SELDOM, lambda _, __: 1


def _about(mean: float) -> Value:
    return lambda number, dice: round(mean * (0.6 + 0.4 * math.sin(number)) * dice.uniform(0.8, 1.2), 2)


def write(folder: Path, now: int) -> int:
    """The blocks in `data` of the folder, by promtool; the number of samples."""
    page, samples = folder / "fleet.om", 0
    with page.open("w") as file:
        for name, label_sets, step, value in _series():
            kind = "counter" if name.endswith("_total") else "gauge"
            file.write(f"# TYPE {name} {kind}\n")
            for number, labels in enumerate(label_sets):
                dice = random.Random(number)
                inside = ",".join(f'{key}="{text}"' for key, text in {"cluster": "c1", **labels}.items())
                stamps = [*range(now - DAYS * DAY, now, step), now]
                # In one burst: promtool reads a file of a hundred megabytes.
                file.writelines(f"{name}{{{inside}}} {value(number, dice)} {at}\n" for at in stamps)
                samples += len(stamps)
        file.write("# EOF\n")
    made = subprocess.run(
        [
            *(programs() / "promtool", "tsdb", "create-blocks-from", "--max-block-duration=1536h"),
            *("openmetrics", page, folder / "data"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    page.unlink()
    return samples


@dataclass(frozen=True, slots=True)
class Answer:
    panel: str
    lines: int
    samples: int  # that Prometheus read for it
    seconds: float


async def opened(server: Prometheus, board: str, now: int) -> tuple[float, list[Answer]]:
    """Ask all that a browser asks as it opens a board over 30 days; the seconds until the last answer."""
    (path,) = (each for each in queries.DASHBOARDS if each.stem == board)
    document = json.loads(path.read_text())
    names = [each["name"] for each in document["templating"]["list"]]
    limit, answers = anyio.CapacityLimiter(AT_ONCE), []

    async def ask(title: str, target: Mapping[str, Any]) -> None:
        expression = target["expr"]
        for name in names:
            expression = expression.replace(f"${name}", ".*")
        async with limit:
            began = time.perf_counter()
            if target.get("instant"):
                found = await server.asked("query", query=expression, time=now)
            else:
                start, step = now - DAYS * DAY, DAYS * DAY // POINTS
                found = await server.asked("query_range", query=expression, start=start, end=now, step=step)
            read = found["stats"]["samples"]["totalQueryableSamples"]
            answers.append(Answer(title, len(found["result"]), read, time.perf_counter() - began))

    began = time.perf_counter()
    async with anyio.create_task_group() as group:
        for panel in document["panels"]:
            for target in panel["targets"]:
                group.start_soon(ask, panel["title"], target)
    return time.perf_counter() - began, answers
