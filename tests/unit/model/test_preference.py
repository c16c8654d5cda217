"""The choice of whole GPUs: as good as an exhaustive search, and never without an answer."""

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.gpu import Topology
from agent.model.placement import choose
from tests.unit.model.topo_matrices import MACHINES, machine

EIGHT = [name for name in MACHINES if name not in ("hgx-16", "t4-4")]


def best(topology: Topology, pool: tuple[str, ...], must: tuple[str, ...], size: int) -> tuple[int, int]:
    """Own link score and that of the rest, by trying everything."""
    free = [gpu for gpu in pool if gpu not in must]
    return max(
        (topology.score((*must, *chosen)), topology.score(set(pool) - set(chosen) - set(must)))
        for chosen in combinations(free, size - len(must))
    )


def value(topology: Topology, pool: tuple[str, ...], chosen: tuple[str, ...]) -> tuple[int, int]:
    return topology.score(chosen), topology.score(set(pool) - set(chosen))


@pytest.mark.parametrize("name", [*EIGHT, "t4-4"])
def test_every_request_is_answered_as_by_exhaustive_search(name: str) -> None:
    topology = machine(name)
    chance = random.Random(7)
    pools = [topology.gpus]
    for size in range(1, len(topology.gpus)):
        pools += [tuple(chance.sample(topology.gpus, size)) for _ in range(4)]
    for pool in pools:
        for size in range(1, len(pool) + 1):
            for must in ((), pool[:1], pool[-2:]):
                if len(must) <= size and len(set(must)) == len(must):
                    chosen = choose(topology, pool, must, size)
                    assert len(set(chosen)) == size
                    assert set(must) <= set(chosen) <= set(pool)
                    assert value(topology, pool, chosen) == best(topology, pool, must, size)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_sixteen_gpus_are_answered_as_by_exhaustive_search(size: int) -> None:
    topology = machine("hgx-16")
    chosen = choose(topology, topology.gpus, (), size)
    assert value(topology, topology.gpus, chosen) == best(topology, topology.gpus, (), size)


def test_what_people_expect_of_a_dgx1() -> None:
    topology = machine("dgx1-v100")
    # Two GPUs with two links between them; four that are one ring of the cube mesh.
    assert topology.pair(*choose(topology, topology.gpus, (), 2)) >= 200
    four = choose(topology, topology.gpus, (), 4)
    assert set(four) in ({"GPU0", "GPU1", "GPU2", "GPU3"}, {"GPU4", "GPU5", "GPU6", "GPU7"})


def test_among_equals_the_rest_stays_well_connected() -> None:
    topology = machine("pcie-8")
    # One GPU of a broken pair, not half of a whole one.
    assert choose(topology, ("GPU0", "GPU1", "GPU2"), (), 1) == ("GPU2",)
    assert choose(topology, ("GPU0", "GPU2", "GPU3", "GPU4"), ("GPU0",), 2) == ("GPU0", "GPU2")


def test_gpus_that_nobody_measured_are_taken_last_and_still_taken() -> None:
    topology = machine("t4-4")
    assert choose(topology, ("new", "GPU1", "GPU0"), (), 2) == ("GPU0", "GPU1")
    assert choose(topology, ("new", "GPU1", "GPU0"), (), 3) == ("GPU0", "GPU1", "new")
    assert choose(topology, ("new", "GPU1"), ("new",), 1) == ("new",)
    assert choose(Topology(), ("b", "a"), (), 1) == ("b",)


def test_more_than_there_are_gives_all() -> None:
    topology = machine("t4-4")
    assert set(choose(topology, topology.gpus, (), 9)) == set(topology.gpus)
    assert choose(topology, topology.gpus, ("GPU3", "GPU2"), 1) == ("GPU3",)
    assert choose(topology, (), (), 2) == ()


@given(st.data())
def test_any_matrix_has_a_valid_answer(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 16))
    gpus = [f"g{number}" for number in range(count)]
    pairs = {(a, b): data.draw(st.sampled_from([0, 10, 50, 110, 1860])) for a, b in combinations(gpus, 2)}
    topology = Topology.of(gpus, pairs)
    pool = tuple(data.draw(st.lists(st.sampled_from(gpus), unique=True, min_size=1)))
    must = tuple(data.draw(st.lists(st.sampled_from(pool), unique=True, max_size=3)))
    size = data.draw(st.integers(max(1, len(must)), len(pool)))
    chosen = choose(topology, pool, must, size)
    assert len(set(chosen)) == size
    assert set(must) <= set(chosen) <= set(pool)
