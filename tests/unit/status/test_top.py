"""`top`: the document of a round and the tables it becomes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.simulator.state import ProcessKind
from agent.status import top, top_table
from tests.unit.telemetry.test_containers import Node, in_pod


async def shown(node: Node) -> dict[str, Any]:
    await node.look()
    return top.document(node.parts.sources.read(), {node.uuids[0]: "mps"})


async def test_what_a_container_may_use_now_stands_beside_what_it_asked_for(tmp_path: Path) -> None:
    node = Node(tmp_path)
    await node.look()
    (container,) = top.document(node.parts.sources.read(), {})["containers"]
    assert container["coreAllottedRatio"] is None
    place = (container["namespace"], container["pod"], container["container"], node.uuids[0])
    found = top.document(node.parts.sources.read(), {}, {place: 0.625})
    table = top_table.render(found).splitlines()
    head = next(line for line in table if line.startswith("NAMESPACE/POD"))
    row = next(line for line in table if line.startswith(f"{place[0]}/{place[1]}"))
    assert row[head.index("GOT") :].startswith("62 %")
    assert "GOT" not in top_table.render(top.document(node.parts.sources.read(), {}))


async def test_gpus_and_containers_in_one_view(tmp_path: Path) -> None:
    node = Node(tmp_path)
    # A sampler's first round looks back by its interval alone, 0.1 s; later ones to the round before.
    await node.look()
    in_pod(tmp_path, 11)
    machine = node.parts.machine
    machine.load(0, utilization=80, power_w=400, temperature_c=70)
    machine.gpu(0).event_reasons = 0x40
    machine.processes.start(0, 11, ProcessKind.MPS, 2048)
    machine.processes.work(11, 75)
    found = await shown(node)
    assert len(found["gpus"]) == 8
    first = found["gpus"][0]
    assert (first["mode"], first["utilizationRatio"], first["processes"]) == ("mps", 0.8, 1)
    (container,) = found["containers"]
    assert container["memoryUsedBytes"] == 2048 << 20
    assert container["utilizationRatio"] == 0.75
    text = top_table.render(found)
    gpu = next(line for line in text.splitlines() if line.startswith("0 "))
    assert "80 %" in gpu
    assert "[||||||||  ]" in gpu
    assert "2.0 / 141" in gpu or "2.0 / 140" in gpu
    assert "GPU 0: clocks are held down by hw_thermal" in text
    assert "team/train" in text
    assert "~" not in text


async def test_what_is_not_known_is_marked(tmp_path: Path) -> None:
    node = Node(tmp_path)
    cell = node.parts.sampler.samples
    await node.look()
    taken = cell.value.taken[node.uuids[0]]
    blind = replace(taken, sample=replace(taken.sample, processes=None, memory_used_bytes=1 << 30), work=None)
    await node.watch.look(replace(cell.value, taken={node.uuids[0]: blind}))
    text = top_table.render(top.document(node.parts.sources.read(), {}))
    assert "~1.0" in text
    assert "~ estimated" in text
    await node.watch.look(replace(cell.value, taken={}))
    found = top.document(node.parts.sources.read(), {})
    assert "? the driver reports nothing" in top_table.render(found)
    (container,) = found["containers"]
    assert (container["memoryUsedBytes"], container["utilizationRatio"], container["processes"]) == (
        None,
    ) * 3


def test_an_empty_node() -> None:
    assert "no container holds a GPU" in top_table.render({"gpus": [], "containers": []})


def test_a_terminal_does_not_scroll() -> None:
    gpu = {
        "index": 0,
        "uuid": "G",
        "model": "NVIDIA H200",
        "mode": "vgpu",
        "health": "healthy",
        "memoryTotalBytes": 1 << 37,
        "sampled": False,
        "throttledBy": [],
    }
    box = {
        "namespace": "team",
        "pod": "p",
        "container": "main",
        "gpu": 0,
        "mode": "vgpu",
        "processes": 1,
        "memoryUsedBytes": 1,
        "memoryLimitBytes": 1 << 30,
        "memoryAttribution": "measured",
        "utilizationRatio": 0.1,
        "utilizationMaxRatio": 0.2,
        "coreLimitRatio": 0.1,
        "coreAllottedRatio": None,
        "utilizationAttribution": "measured",
    }
    shown = {"gpus": [gpu] * 8, "containers": [box] * 60}
    lines = top_table.render(shown, 80, 24).splitlines()
    assert len(lines) == 23
    assert sum("NVIDIA H200" in line for line in lines) == 8
    assert lines[-1].startswith("... 49 more lines")
    assert max(map(len, lines)) <= 80
    assert len(top_table.render(shown).splitlines()) > 70
