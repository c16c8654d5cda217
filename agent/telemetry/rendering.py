"""/metrics: a reading of the agent as a page, in the format that was asked for.

There may be thousands of series, on a page that has 60 ms: prometheus_client's own rendering would take most
of it, so it only says which format a caller wants.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator

import anyio
import anyio.to_thread

from agent.telemetry import definitions as d
from agent.telemetry.series import (
    COMPATIBLE,
    Reading,
    Series,
    Sources,
    compatible_series,
    read_process_use,
    series_of,
)
from agent.web.server import Handler, HttpRequest, HttpServer, Reply

# A reading as a page, in the format and the encoding that were asked for.

# A page of 3,200 series shrinks to a twentieth at any level; higher ones only cost time.
GZIP_LEVEL = 1
GZIP_FORMAT = 31  # zlib: gzip header, the largest window
_SIMULATED = 'simulated="true"'
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Labels = tuple[str, ...]


def render(
    reading: Reading,
    accept: str = "",
    encodings: str = "",
    compatible_node: str | None = None,
    simulated: bool = False,
) -> Reply:
    """The page for a reading, in the format that `accept` prefers, compressed if `encodings` allows.

    With `compatible_node`, the node's name, gpu-manager's metrics stand on it, too. `simulated` is a label of
    every series then, lest somebody takes them for a GPU's.
    """
    # With the first page, in a thread: the sockets would wait 8 ms for what nobody has asked for yet.
    from prometheus_client.exposition import choose_encoder, gzip_accepted  # noqa: PLC0415

    try:
        _, content_type = choose_encoder(accept)
    except (ValueError, TypeError):  # a version that is no number: the plain format is understood by all
        _, content_type = choose_encoder("")
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    openmetrics = content_type.startswith("application/openmetrics")
    pages = _families(reading, compatible_node, openmetrics, _SIMULATED if simulated else "")
    if not gzip_accepted(encodings):
        return Reply(b"".join(pages), 200, headers)
    headers["Content-Encoding"] = "gzip"
    # Bit by bit: a single call over the whole page would keep the event loop from the interpreter.
    squeeze = zlib.compressobj(GZIP_LEVEL, wbits=GZIP_FORMAT)
    packed = [*map(squeeze.compress, pages), squeeze.flush()]
    return Reply(b"".join(packed), 200, headers)


def _families(reading: Reading, compatible_node: str | None, openmetrics: bool, mark: str) -> Iterator[bytes]:
    """The page family by family, those without a series included; `mark`: a label of all series, or empty."""
    yield from written(d.ALL, series_of(reading, read_process_use()), openmetrics, mark)
    if compatible_node is not None:
        series = compatible_series(reading.uses.containers, compatible_node)
        yield from written(COMPATIBLE, series, openmetrics, mark)
    if openmetrics:
        yield b"# EOF\n"


def written(
    definitions: Iterable[d.Definition], series: Iterable[Series], openmetrics: bool = False, mark: str = ""
) -> Iterator[bytes]:
    """The families of `definitions`, in that order, in Prometheus' text format or in OpenMetrics."""
    # The families of a container share its labels: each set is written once.
    known: dict[Labels, dict[Labels, str]] = {each.labels: {} for each in definitions}
    before = {names: _last.get((names, mark), {}) for names in known}
    pages = {
        each.name: (_head(each, openmetrics), each.series, each.labels, known[each.labels])
        for each in definitions
    }
    for definition, value, labels in series:
        lines, name, names, texts = pages[definition.name]
        text = texts.get(labels)
        if text is None:
            text = texts[labels] = before[names].get(labels) or _labels(names, labels, mark)
        # A truth value plus 0 is a number.
        lines.append(f"{name}{text} {value + 0!r}\n")
    _last.update({(names, mark): texts for names, texts in known.items()})
    for lines, *_ in pages.values():
        yield "".join(lines).encode()


def _head(definition: d.Definition, openmetrics: bool) -> list[str]:
    name, kind = definition.name, definition.kind
    if not openmetrics:  # which knows no kind `info`, and counters by the name of their series
        name, kind = definition.series, "gauge" if kind == "info" else kind
    lines = [f"# HELP {name} {definition.help}\n", f"# TYPE {name} {kind}\n"]
    if openmetrics and definition.unit:
        lines.append(f"# UNIT {name} {definition.unit}\n")
    return lines


# Containers have the same labels from one scrape to the next: those of 800 are a sixth of the page's time. By
# the labels' names, as the last page had them: those of containers that are gone go with the next page.
_last: dict[tuple[Labels, str], dict[Labels, str]] = {}


def _labels(names: Labels, values: Labels, mark: str) -> str:
    pairs = [mark] if mark else []
    pairs += [f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    # Translating takes ten times as long as to see that there is nothing to translate.
    return value.translate(_ESCAPES) if '"' in value or "\\" in value or "\n" in value else value


# /metrics: in Prometheus' text format or OpenMetrics as asked, rendered and compressed off the loop.

METRICS_PATH = "/metrics"


class MetricsPage:
    """Answers scrapes. No NVML call is made for one: it shows the sampler's last round."""

    def __init__(
        self, sources: Sources, compatible_node: str | None = None, *, simulated: bool = False
    ) -> None:
        """`compatible_node`: the node's name, for gpu-manager's metrics beside the agent's; None: without.

        `simulated`: the GPUs are, and every series says so.
        """
        self._simulated = simulated
        self._sources = sources
        self._compatible_node = compatible_node
        # One rendering at a time: many scrapers must not take the worker threads or the processor away.
        self._turn = anyio.CapacityLimiter(1)

    def add_to(self, server: HttpServer, guarded: Callable[[Handler], Handler] = lambda page: page) -> None:
        """`guarded`: who may have it."""
        for path in self._paths:
            server.add_route(path, guarded(self.reply))

    def refer(self, server: HttpServer, port: int) -> None:
        """Say on another server where the page is."""

        async def elsewhere(_: HttpRequest) -> Reply:
            served = f"metrics are served over HTTPS on port {port}, to accounts that may get them"
            return Reply.text(served, 403)

        for path in self._paths:
            server.add_route(path, elsewhere)

    @property
    def _paths(self) -> tuple[str, ...]:
        # gpu-manager serves them at the second.
        return (METRICS_PATH,) if self._compatible_node is None else (METRICS_PATH, "/metric")

    async def reply(self, request: HttpRequest) -> Reply:
        reading = self._sources.read()
        accept, encodings = request.headers.get("Accept", ""), request.headers.get("Accept-Encoding", "")
        node = self._compatible_node
        arguments = (reading, accept, encodings, node, self._simulated)
        return await anyio.to_thread.run_sync(render, *arguments, limiter=self._turn)
