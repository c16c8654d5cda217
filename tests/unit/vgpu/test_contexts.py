"""The cost of a context, by figures of containers."""

import os
import struct
from pathlib import Path

import anyio.to_thread
import pytest

from agent.vgpu import layout
from agent.vgpu.folders import USAGE, About
from agent.vgpu.limits import LEAST_BYTES, MOST_BYTES, STABLE_READINGS, Contexts, context_bytes
from tests.unit.vgpu.made_up import GPU, units
from tests.unit.vgpu.test_watch import CAP, MIB, Node

OTHER = "GPU-00000000-0000-0000-0000-000000000002"
WHOLE = 1 << 40
CONTEXT = 300 * MIB


def learned(contexts: Contexts, key: str, figure: int, gpu: str = GPU, namespace: str = "default") -> None:
    for _ in range(STABLE_READINGS):
        contexts.measured(key, (gpu, namespace), 100 * MIB + figure, (100 * MIB, 0), WHOLE)


def test_the_least_that_was_measured_counts_and_a_gpu_without_a_figure_takes_that_of_the_others() -> None:
    contexts = Contexts()
    assert contexts.of(GPU, WHOLE) == 0
    learned(contexts, "a", 500 * MIB)
    learned(contexts, "b", CONTEXT)
    learned(contexts, "c", 400 * MIB)
    assert contexts.of(GPU, WHOLE) == contexts.of(OTHER, WHOLE) == CONTEXT
    learned(contexts, "d", 200 * MIB, OTHER)
    assert (contexts.of(GPU, WHOLE), contexts.of(OTHER, WHOLE)) == (CONTEXT, 200 * MIB)
    contexts.keep(["a", "c"])
    learned(contexts, "c", 400 * MIB)
    assert contexts.of(GPU, WHOLE) == 400 * MIB
    contexts.keep([])
    assert contexts.of(GPU, WHOLE) == 400 * MIB  # who comes next is charged what the last ones were
    assert contexts.of(GPU, 512 * MIB) == 256 * MIB  # and half of its cap at most


def test_a_table_counts_until_somebody_measures_and_bounds_what_few_measure() -> None:
    contexts = Contexts(lambda gpu: CONTEXT if gpu == GPU else 0)
    assert (contexts.of(GPU, WHOLE), contexts.of(OTHER, WHOLE)) == (CONTEXT, 0)
    learned(contexts, "a", 500 * MIB)
    assert (contexts.of(GPU, WHOLE), contexts.of(OTHER, WHOLE)) == (CONTEXT, CONTEXT)
    learned(contexts, "a", 250 * MIB)
    assert contexts.of(GPU, WHOLE) == 250 * MIB
    for namespace in ("one", "two", "three"):
        learned(contexts, namespace, 400 * MIB, namespace=namespace)
    contexts.keep(["one", "two", "three"])
    learned(contexts, "one", 400 * MIB, namespace="one")
    assert contexts.of(GPU, WHOLE) == 400 * MIB


def test_the_table_knows_products_by_a_word_of_their_names() -> None:
    assert context_bytes("NVIDIA A100-SXM4-80GB") == 432 * MIB
    assert context_bytes("NVIDIA H200") == 528 * MIB
    assert context_bytes("Tesla T4") == 80 * MIB
    assert context_bytes("NVIDIA GeForce RTX 9090") == 0


def test_what_is_charged_for_contexts_is_no_part_of_the_rest() -> None:
    contexts = Contexts()
    for _ in range(STABLE_READINGS):
        contexts.measured("a", (GPU, "default"), 400 * MIB, (600 * MIB, 500 * MIB), WHOLE)
    assert contexts.of(GPU, WHOLE) == CONTEXT


@pytest.mark.parametrize("figure", [0, LEAST_BYTES - 1, MOST_BYTES + 1])
def test_what_no_context_takes_is_not_believed(figure: int) -> None:
    contexts = Contexts()
    learned(contexts, "a", figure)
    contexts.remembered("b", (GPU, "default"), figure, WHOLE)
    contexts.remembered("c", (GPU, "default"), CONTEXT, 2 * CONTEXT)  # half of a cap: it may be more
    assert contexts.of(GPU, WHOLE) == 0


def test_readings_of_different_moments_say_nothing() -> None:
    contexts = Contexts()
    for number in range(10):
        contexts.measured("a", (GPU, "default"), CONTEXT + number, (number % 2, 0), WHOLE)
    for sole in ((0, 0), (0, 0), None, (0, 0), (0, 0)):
        contexts.measured("b", (GPU, "default"), CONTEXT, sole, WHOLE)
    assert contexts.of(GPU, WHOLE) == 0


async def test_context_price_is_bounded(node: Node) -> None:
    """A container's uncounted memory, or a figure that it forged, is not the price of all contexts."""
    key = await node.admit()
    await anyio.to_thread.run_sync(node.loaded, 7)
    await anyio.to_thread.run_sync(counted, node.isolation.folders.path(key, USAGE), (200 * MIB, 0))
    for _ in range(STABLE_READINGS):  # 200 MiB by cuMemAlloc, 3,000 MiB past the library
        await node.look(3200 * MIB, 7, cap=8192 * MIB)
    contexts = node.isolation.contexts
    assert contexts.of(GPU, WHOLE) == 0  # it is above its cap
    learned(contexts, key, 3000 * MIB)
    prices = [contexts.of(GPU, cap * MIB) // MIB for cap in (1000, 2048, 4096, 10240)]
    assert prices == [500, 600, 600, 600]
    again = Node(node.root)
    await again.isolation.start()
    assert again.isolation.contexts.of(GPU, WHOLE) <= 600 * MIB
    # Others' figures count as soon as there are any, however many containers the first one's namespace has.
    learned(contexts, "b", 3000 * MIB)
    learned(contexts, "honest", CONTEXT, namespace="other")
    assert contexts.of(GPU, WHOLE) == CONTEXT
    # Nor does one namespace among three lower it, or raise it.
    learned(contexts, "third", CONTEXT + 20 * MIB, namespace="third")
    for forged in (LEAST_BYTES, MOST_BYTES):
        for folder in (key, "b"):
            learned(contexts, folder, forged)
        assert CONTEXT <= contexts.of(GPU, WHOLE) <= CONTEXT + 20 * MIB
    # What three namespaces have shown is a GPU of another kind.
    for folder, namespace in (("honest", "other"), ("third", "third"), (key, "default"), ("b", "default")):
        learned(contexts, folder, 800 * MIB, namespace=namespace)
    assert contexts.of(GPU, WHOLE) == 800 * MIB


def counted(region: Path, *slots: tuple[int, int]) -> None:
    """Write bytes charged and those for contexts, by process."""
    descriptor = os.open(region, os.O_RDWR)
    total = sum(charged for charged, _ in slots)
    os.pwrite(descriptor, struct.pack("<Q", total), layout.USAGE_HEADER_BYTES + layout.FIGURES_AT)
    for number, (charged, of_contexts) in enumerate(slots):
        slot = layout.SLOT.pack(number + 1, 1, charged, of_contexts)
        os.pwrite(descriptor, slot, layout.SLOTS_AT + number * layout.SLOT_BYTES)
    os.close(descriptor)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_containers_are_charged_what_others_showed(node: Node) -> None:
    key = await node.admit()
    await anyio.to_thread.run_sync(node.loaded, 7)
    folders = node.isolation.folders

    async def charged(folder: str) -> int:
        return (await anyio.to_thread.run_sync(folders.limits, folder)).context_bytes

    await anyio.to_thread.run_sync(counted, folders.path(key, USAGE), (100 * MIB, 0), (0, 0))
    for _ in range(5):
        await node.look(100 * MIB + CONTEXT, 7)
    assert await charged(key) == 0  # of two processes nobody knows which has how many
    await anyio.to_thread.run_sync(node.isolation.folders.remove, key)
    await node.isolation.start()
    key = await node.admit()
    await anyio.to_thread.run_sync(node.loaded, 7)
    await anyio.to_thread.run_sync(counted, folders.path(key, USAGE), (100 * MIB, 0))
    for _ in range(5):
        await node.look(100 * MIB + CONTEXT, 7)
    assert await charged(key) == CONTEXT
    await node.isolation.admit(About("uid-b", "default", "b", "main", GPU, units(4), CAP, 30))
    (new,) = set(await anyio.to_thread.run_sync(folders.keys)) - {key}
    assert await charged(new) == CONTEXT
    # An agent that is restarted has it from those that run.
    again = Node(node.root)
    await again.isolation.start()
    assert again.isolation.contexts.of(GPU, WHOLE) == CONTEXT
