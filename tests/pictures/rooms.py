"""The diagram of the process: its rooms, and the programs around it."""

from tests.pictures.svg import COLOURS, GREY, INK, LINE, PALE, PAPER, box, element, line, picture, text

WIDTH, HEIGHT = 1080, 620
# Name, what it is for; x, y, width within the process.
ROOMS = (
    ("web", "edge: HTTP port, status", "socket", 40, 160, 200),
    ("cluster", "edge: Kubernetes API", "", 260, 160, 200),
    ("node", "labels, condition, taint,", "inventory annotation", 480, 160, 200),
    ("kubelet", "edge: device plugin sockets,", "PodResources", 700, 160, 200),
    ("telemetry", "metrics of GPUs, containers,", "and of the agent", 40, 253, 200),
    ("modes", "label or layout to plan", "to switch, GPU by GPU", 260, 253, 200),
    ("lists", "devices and pairs as the", "kubelet is shown them", 480, 253, 200),
    ("holdings", "which container holds", "which units", 700, 253, 200),
    ("inventory", "GPUs, health, topology:", "one actor owns the state", 40, 346, 200),
    ("pairing", "core and memory of a share", "on one GPU", 260, 346, 200),
    ("status", "answers of commands", "on the socket", 480, 346, 200),
    ("injection", "how containers are given", "their GPUs", 700, 346, 200),
    ("nvml", "edge: the driver", "", 40, 440, 200),
    ("mps", "wing: shares behind one", "daemon for each GPU", 260, 440, 200),
    ("vgpu", "wing: fractions and the", "limits of containers", 480, 440, 200),
    ("whole", "wing: whole GPUs and", "time slices", 700, 440, 200),
)
AROUND = (
    ("Prometheus, probes", 40, 40, 200, COLOURS[4]),
    ("API server: labels, events", 260, 40, 420, COLOURS[0]),
    ("kubelet", 700, 40, 200, COLOURS[0]),
    ("NVIDIA driver, GPUs", 40, 540, 200, COLOURS[2]),
    ("nvidia-cuda-mps-control", 260, 540, 200, COLOURS[2]),
    ("containers of pods", 480, 540, 420, COLOURS[2]),
)
# From, to, what goes along.
WAYS = (
    (140, 80, 140, 160, "scrape"),
    (360, 80, 360, 160, "watch, patch"),
    (580, 160, 580, 80, "own node only"),
    (800, 80, 800, 160, "Allocate"),
    (140, 500, 140, 540, "NVML"),
    (360, 500, 360, 540, "sockets"),
    (580, 500, 580, 540, "limits file, library"),
    (800, 500, 800, 540, "devices"),
)


def drawn() -> str:
    """The diagram."""
    parts = [
        box(0, 0, WIDTH, HEIGHT, fill=PAPER),
        element(
            "defs",
            element(
                "marker",
                element("path", d="M0,0 L8,4 L0,8 z", fill=GREY),
                id="tip",
                markerWidth=8,
                markerHeight=8,
                refX=7,
                refY=4,
                orient="auto",
            ),
        ),
        box(20, 120, 900, 390, rx=10, fill=PALE, stroke=LINE),
        box(945, 160, 120, 140, rx=10, fill=PALE, stroke=LINE),
        text(962, 184, "extender", size=14, font_weight="bold"),
        *(
            text(962, 210 + 18 * number, words, size=11.5, fill=GREY)
            for number, words in enumerate(
                ("optional, a", "Deployment:", "chooses node", "and GPUs for", "kube-scheduler")
            )
        ),
        line([(1007, 160), (1007, 20), (470, 20), (470, 38)], stroke=GREY, marker_end="url(#tip)"),
        text(800, 14, "reads inventories, binds pods", size=11, fill=GREY),
    ]
    for x1, y1, x2, y2, words in WAYS:
        parts.append(line([(x1, y1), (x2, y2)], stroke=GREY, marker_end="url(#tip)"))
        parts.append(text(x1 + 8, (min(y1, y2) + 34) if y1 < 300 else y2 - 8, words, size=11, fill=GREY))
    parts += [
        box(255, 452, 500, 32, fill=PALE),
        text(262, 474, "gpu-node-agent: one process on each GPU node", size=16, font_weight="bold"),
    ]
    for name, first, second, x, y, width in ROOMS:
        high = 70 if second else 56
        parts += [
            box(x, y, width, high, rx=6, fill=PAPER, stroke=LINE),
            text(x + 10, y + 20, name, size=13, font_weight="bold"),
            text(x + 10, y + 39, first, size=11.5, fill=GREY),
            text(x + 10, y + 55, second, size=11.5, fill=GREY),
        ]
    for words, x, y, width, colour in AROUND:
        parts += [
            box(x, y, width, 40, rx=6, fill=PAPER, stroke=colour, stroke_width=2),
            text(x + width / 2, y + 25, words, size=13, fill=INK, text_anchor="middle"),
        ]
    parts.append(text(20, 606, "Names in boxes are packages below agent/; imports run one way.", size=11.5))
    return picture(WIDTH, HEIGHT, "The process of gpu-node-agent, its rooms, and what is around it", parts)
