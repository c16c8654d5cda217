"""A reading as a page, in the format and the encoding that were asked for."""

import re
import zlib
from collections.abc import Iterator

from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.registry import CollectorRegistry

from agent.telemetry.container_page import compatible_page, container_page
from agent.telemetry.families import AgentCollector
from agent.telemetry.process import read_process_use
from agent.telemetry.reading import Reading
from agent.web.server import Reply

# A page of 3,200 series shrinks to a twentieth at any level; higher ones only cost time.
GZIP_LEVEL = 1
GZIP_FORMAT = 31  # zlib: gzip header, the largest window
_NAME = re.compile(rb"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:(\{)| )", re.MULTILINE)
_LABEL = b'{simulated="true"'
END = b"# EOF\n"  # of OpenMetrics


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
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AgentCollector(reading, read_process_use()))
    try:
        encode, content_type = choose_encoder(accept)
    except (ValueError, TypeError):  # a version that is no number: the plain format is understood by all
        encode, content_type = choose_encoder("")
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    pages = _pages(reading, encode(registry), content_type, compatible_node)
    if simulated:
        pages = map(_marked, pages)
    if not gzip_accepted(encodings):
        return Reply(b"".join(pages), 200, headers)
    headers["Content-Encoding"] = "gzip"
    # Bit by bit: a single call over the whole page would keep the event loop from the interpreter.
    squeeze = zlib.compressobj(GZIP_LEVEL, wbits=GZIP_FORMAT)
    packed = [*map(squeeze.compress, pages), squeeze.flush()]
    return Reply(b"".join(packed), 200, headers)


def _marked(page: bytes) -> bytes:
    """Every series with the label; names begin a line, and no value holds a line's end."""
    return _NAME.sub(lambda name: name[1] + _LABEL + (b"," if name[2] else b"} "), page)


def _pages(reading: Reading, body: bytes, content_type: str, compatible_node: str | None) -> Iterator[bytes]:
    yield body.removesuffix(END)
    containers = reading.uses.containers
    for text in container_page(containers, units=content_type.startswith("application/openmetrics")):
        yield text.encode()
    if compatible_node is not None:
        for text in compatible_page(containers, compatible_node):
            yield text.encode()
    if body.endswith(END):
        yield END
