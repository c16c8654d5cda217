"""Answers to those who only ask whether a pod would fit, as autoscalers do: nothing is kept, or waited for.

Nodes that the ledger has are judged by it. Of others, which an autoscaler may add, the request brings the
object: its GPUs are those of its inventory, if it was copied from a node, or made up of labels and
allocatable units, all alike and free.
"""

from collections.abc import Mapping
from dataclasses import replace

import anyio.lowlevel
import msgspec

from agent.extender.fleet import Fleet, LedgerNode
from agent.extender.objects import read_node
from agent.extender.pod_demand import WHOLE_GPUS, PodDemand
from agent.extender.scheduler_protocol import Asked, BadRequest
from agent.extender.verdicts import REQUEST_STEPS, Verdicts
from agent.model.modes import PAIRS, Mode
from agent.model.node_inventory import MOST_GPUS, GpuEntry, NodeInventory
from agent.model.pod import CORES

MEMORY = "nvidia.com/gpu.memory"  # node label: MiB of each GPU
NODES_AT_ONCE = 128  # that are decoded before others run: a few milliseconds
MOST_STEPS = 10 * REQUEST_STEPS  # for kinds that are imagined: a quarter of a second, with others in between
_MIB = 1 << 20


async def simulated(verdicts: Verdicts, demand: PodDemand, asked: Asked) -> tuple[list[str], dict[str, str]]:
    """Nodes that a pod would fit on, and the others with the reason. Raises BadRequest."""
    fleet, uid = verdicts.fleet, asked.pod.metadata.uid
    mine = fleet.where(uid)  # bound there, or kept for it as a member of a gang
    known = [name for name in asked.names if name != mine and name in fleet.nodes]
    _, refused = await verdicts.judge(demand, known)
    imagined = Fleet(fleet.mix)
    # Node groups are few, and nodes of one are alike: one of each kind is judged.
    kinds: dict[object, str] = {}
    kind_of: dict[str, str] = {}
    for number, (name, raw) in enumerate((asked.objects or {}).items()):
        if name not in fleet.nodes:
            node = _imagined(raw)
            kind = kinds.setdefault((node.inventory, node.problem, *sorted(node.totals.items())), name)
            kind_of[name] = kind
            if kind == name:
                imagined.set_node(node)
        if number % NODES_AT_ONCE == 0:
            await anyio.lowlevel.checkpoint()
    others = [name for name in asked.names if name != mine and name not in fleet.nodes]
    of_kinds = dict.fromkeys(kind_of.get(name, name) for name in others)
    # No next attempt goes on from here: what is imagined is forgotten.
    _, no = await Verdicts(imagined).judge(demand, of_kinds, MOST_STEPS)
    for name in others:
        if reason := no.get(kind_of.get(name, name)):
            refused[name] = reason
    return [name for name in asked.names if name not in refused], refused


def _imagined(raw: msgspec.Raw) -> LedgerNode:
    try:
        metadata, node = read_node(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"a node cannot be understood: {error}; nothing was done") from error
    return node if node.inventory else replace(node, inventory=_made_up(node.totals, metadata.labels))


def _made_up(totals: Mapping[str, int], labels: Mapping[str, str]) -> NodeInventory | None:
    """GPUs that would offer these units; None: there are none, or more than a node can have."""
    found: list[GpuEntry] = []
    for mode, pair in PAIRS.items():
        count = totals.get(pair.core, 0) // CORES
        if count > MOST_GPUS:
            return None
        for _ in range(count):
            share = totals.get(pair.memory, 0) // count * pair.block_bytes + pair.reserved_bytes
            told = labels.get(MEMORY, "")
            memory = int(told) if told.isdecimal() and len(told) < len(str(1 << 31)) else share // _MIB
            found.append(GpuEntry(f"imagined-{len(found)}", len(found), mode, memory))
    whole = max(totals.get(name, 0) for name in WHOLE_GPUS)
    if whole + len(found) > MOST_GPUS:
        return None
    found += [GpuEntry(f"imagined-{n}", n, Mode.PGPU, 0) for n in range(len(found), len(found) + whole)]
    return NodeInventory(tuple(found)) if found else None
