"""A reading as a page, in the format and the encoding that were asked for."""

import gzip

from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.registry import CollectorRegistry

from agent.telemetry.container_page import compatible_page, container_page
from agent.telemetry.metrics import AgentCollector
from agent.telemetry.process import read_process_use
from agent.telemetry.reading import Reading
from agent.web.server import Reply

# A page of 3,200 series shrinks to a twentieth at any level; higher ones only cost time.
GZIP_LEVEL = 1
END = b"# EOF\n"  # of OpenMetrics


def render(
    reading: Reading, accept: str = "", encodings: str = "", compatible_node: str | None = None
) -> Reply:
    """The page for a reading, in the format that `accept` prefers, compressed if `encodings` allows.

    With `compatible_node`, the node's name, gpu-manager's metrics stand on it, too.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AgentCollector(reading, read_process_use()))
    try:
        encode, content_type = choose_encoder(accept)
    except (ValueError, TypeError):  # a version that is no number: the plain format is understood by all
        encode, content_type = choose_encoder("")
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    body = encode(registry)
    containers = reading.uses.containers
    more = container_page(containers, units=content_type.startswith("application/openmetrics"))
    if compatible_node is not None:
        more += compatible_page(containers, compatible_node)
    body = body.removesuffix(END) + more.encode() + (END if body.endswith(END) else b"")
    if gzip_accepted(encodings):
        headers["Content-Encoding"] = "gzip"
        body = gzip.compress(body, GZIP_LEVEL, mtime=0)
    return Reply(body, 200, headers)
