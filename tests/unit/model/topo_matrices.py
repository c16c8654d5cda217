"""Real machines as `nvidia-smi topo -m` shows them (GPU columns), and the pair scores in them.

`NV#` hides the PCIe path of a pair; where it counts, `PATHS` holds the matrix of the same machine as a
driver without NVLink shows it.
"""

import re

from agent.model.gpu import Topology, pair_score

LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}

DGX1_V100 = """
        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7    mlx5_0  CPU Affinity
GPU0     X      NV1     NV1     NV2     NV2     SYS     SYS     SYS     PIX     0-19,40-59
GPU1    NV1      X      NV2     NV1     SYS     NV2     SYS     SYS     PIX     0-19,40-59
GPU2    NV1     NV2      X      NV2     SYS     SYS     NV1     SYS     PHB     0-19,40-59
GPU3    NV2     NV1     NV2      X      SYS     SYS     SYS     NV1     PHB     0-19,40-59
GPU4    NV2     SYS     SYS     SYS      X      NV1     NV1     NV2     SYS     20-39,60-79
GPU5    SYS     NV2     SYS     SYS     NV1      X      NV2     NV1     SYS     20-39,60-79
GPU6    SYS     SYS     NV1     SYS     NV1     NV2      X      NV2     SYS     20-39,60-79
GPU7    SYS     SYS     SYS     NV1     NV2     NV1     NV2      X      SYS     20-39,60-79

Legend:
  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def _switched(count: int, links: int) -> str:
    """Every pair with the same number of links, as on machines with NVSwitches."""
    head = "\t" + "\t".join(f"GPU{number}" for number in range(count)) + "\tCPU Affinity\tNUMA Affinity"
    rows = [
        f"GPU{row}\t"
        + "\t".join(" X " if row == column else f"NV{links}" for column in range(count))
        + f"\t{row // (count // 2)}-47\t{row // (count // 2)}"
        for row in range(count)
    ]
    return "\n".join([head, *rows])


DGX_A100 = _switched(8, 12)
DGX_H100 = _switched(8, 18)
HGX_16 = _switched(16, 6)

PCIE_8 = """
	GPU0	GPU1	GPU2	GPU3	GPU4	GPU5	GPU6	GPU7	NIC0	CPU Affinity	NUMA Affinity
GPU0	 X 	PIX	PXB	PXB	SYS	SYS	SYS	SYS	NODE	0-13,28-41	0
GPU1	PIX	 X 	PXB	PXB	SYS	SYS	SYS	SYS	NODE	0-13,28-41	0
GPU2	PXB	PXB	 X 	PIX	SYS	SYS	SYS	SYS	NODE	0-13,28-41	0
GPU3	PXB	PXB	PIX	 X 	SYS	SYS	SYS	SYS	NODE	0-13,28-41	0
GPU4	SYS	SYS	SYS	SYS	 X 	PIX	PXB	PXB	SYS	14-27,42-55	1
GPU5	SYS	SYS	SYS	SYS	PIX	 X 	PXB	PXB	SYS	14-27,42-55	1
GPU6	SYS	SYS	SYS	SYS	PXB	PXB	 X 	PIX	SYS	14-27,42-55	1
GPU7	SYS	SYS	SYS	SYS	PXB	PXB	PIX	 X 	SYS	14-27,42-55	1
NIC0	NODE	NODE	NODE	NODE	SYS	SYS	SYS	SYS	 X
"""

T4_4 = """
        GPU0    GPU1    GPU2    GPU3    CPU Affinity
GPU0     X      PHB     PHB     PHB     0-47
GPU1    PHB      X      PHB     PHB     0-47
GPU2    PHB     PHB      X      PHB     0-47
GPU3    PHB     PHB     PHB      X      0-47
"""

# The PCIe paths behind `NV#`: GPUs of a pair on one switch, four under a host bridge, two sockets.
DGX1_PATHS = PCIE_8.replace("PXB", "PHB")
DGX_A100_PATHS = "\n".join(
    ["\t" + "\t".join(f"GPU{number}" for number in range(8))]
    + [
        f"GPU{row}\t"
        + "\t".join(("X" if a == row else "PXB" if a // 2 == row // 2 else "SYS") for a in range(8))
        for row in range(8)
    ]
)
DGX_H100_PATHS = "\n".join(
    ["\t" + "\t".join(f"GPU{number}" for number in range(8))]
    + [
        f"GPU{row}\t"
        + "\t".join(("X" if a == row else "NODE" if a // 4 == row // 4 else "SYS") for a in range(8))
        for row in range(8)
    ]
)
HGX_16_PATHS = "\n".join(
    ["\t" + "\t".join(f"GPU{number}" for number in range(16))]
    + [
        f"GPU{row}\t"
        + "\t".join(
            "X"
            if a == row
            else next(
                word
                for word, size in (("PIX", 2), ("PXB", 4), ("NODE", 8), ("SYS", 16))
                if a // size == row // size
            )
            for a in range(16)
        )
        for row in range(16)
    ]
)

MACHINES = {
    "dgx1-v100": (DGX1_V100, DGX1_PATHS),
    "dgx-a100": (DGX_A100, DGX_A100_PATHS),
    "dgx-h100": (DGX_H100, DGX_H100_PATHS),
    "pcie-8": (PCIE_8, PCIE_8),
    "t4-4": (T4_4, T4_4),
    "hgx-16": (HGX_16, HGX_16_PATHS),
}


def cells(text: str) -> dict[tuple[str, str], str]:
    """The words of a matrix by (row GPU, column GPU); NICs, affinities and the legend are passed over."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    columns = [word for word in lines[0] if re.fullmatch(r"GPU\d+", word)]
    found = {}
    for words in lines[1:]:
        if re.fullmatch(r"GPU\d+", words[0]):
            row = zip(columns, words[1 : len(columns) + 1], strict=True)
            found.update({(words[0], column): word for column, word in row if word != "X"})
    return found


def machine(name: str) -> Topology:
    """The pair scores of a machine."""
    links, paths = (cells(text) for text in MACHINES[name])
    scores = {}
    for pair, word in links.items():
        wires = int(word[2:]) if word.startswith("NV") else 0
        path = paths[pair]
        scores[pair] = pair_score(LEVELS.get(path, -1), wires)
    gpus = sorted({one for one, _ in links}, key=lambda gpu: int(gpu[3:]))
    return Topology.of(gpus, scores)
