"""The inventory annotation: compact, the same both ways, and refused where it is not understood."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.model.modes import Mode
from agent.model.node_inventory import BadInventory, GpuEntry, NodeInventory, decode, encode

ENTRY = GpuEntry("GPU-0", 0, Mode.VGPU, 81920)


def uuid(number: int) -> str:
    return f"GPU-5fd4f087-86f3-7a43-b711-{number:012x}"


@given(
    st.lists(
        st.builds(
            GpuEntry,
            st.just(""),
            st.just(0),
            st.sampled_from(Mode),
            st.integers(0, 1 << 20),
            st.booleans(),
            st.text("abc 79.", max_size=40),
            st.integers(1, 100),
            st.integers(0, 60),
        ),
        max_size=16,
    ),
    st.booleans(),
)
def test_it_reads_what_it_wrote(entries: list[GpuEntry], linked: bool) -> None:
    gpus = tuple(
        GpuEntry(uuid(n), n, e.mode, e.memory_mib, e.offered, e.trouble, e.replicas, e.clients)
        for n, e in enumerate(entries)
    )
    pairs = len(gpus) * (len(gpus) - 1) // 2
    links = tuple(range(10, 10 + pairs)) if linked and pairs else ()
    inventory = NodeInventory(gpus, links)
    assert decode(encode(inventory)) == inventory


def test_sixteen_gpus_in_any_state_stay_below_4_kib() -> None:
    gpus = tuple(GpuEntry(uuid(n), n, Mode.MPS, 2**31, False, 'ü€𝄞\\"' * 40, 1, 60) for n in range(16))
    text = encode(NodeInventory(gpus, tuple(range(10000, 10120))))
    assert len(text.encode()) <= 4096


def test_links_come_back_as_a_topology() -> None:
    gpus = tuple(GpuEntry(uuid(n), n, Mode.VGPU, 81920) for n in (0, 2, 5))
    topology = decode(encode(NodeInventory(gpus, (10, 20, 30)))).topology
    assert (topology.pair("0", "2"), topology.pair("0", "5"), topology.pair("2", "5")) == (10, 20, 30)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot be understood"),
        ("{" * 5000, "cannot be understood"),
        ('{"v":2,"gpus":[]}', "version 2"),
        ('{"v":1,"gpus":[{"u":"a","i":0,"m":"half","mem":1}]}', "cannot be understood"),
        ('{"v":1,"gpus":[{"u":"a","i":-1,"m":"vgpu","mem":1}]}', "cannot be understood"),
        (
            '{"v":1,"gpus":[{"u":"a","i":0,"m":"vgpu","mem":1},{"u":"b","i":0,"m":"vgpu","mem":1}]}',
            "names a GPU twice",
        ),
        ('{"v":1,"gpus":[{"u":"a","i":0,"m":"vgpu","mem":1}],"links":[1,2]}', "2 link scores for 0 pairs"),
        ("x" * 70000, "more than 65536"),
    ],
)
def test_what_is_not_understood_is_refused_with_a_reason(text: str, says: str) -> None:
    with pytest.raises(BadInventory, match=says):
        decode(text)


def test_blocks_follow_the_mode() -> None:
    assert ENTRY.blocks == 320
    assert GpuEntry("GPU-0", 0, Mode.MPS, 81920).blocks == 79
    assert GpuEntry("GPU-0", 0, Mode.PGPU, 81920).blocks == 0
