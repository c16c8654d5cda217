"""A reading as a page, in the format and the encoding that were asked for."""

import gzip

from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.registry import CollectorRegistry

from agent.telemetry.metrics import AgentCollector
from agent.telemetry.process import read_process_use
from agent.telemetry.reading import Reading
from agent.web.server import Reply

# A page of 3,200 series shrinks to a twentieth at any level; higher ones only cost time.
GZIP_LEVEL = 3


def render(reading: Reading, accept: str = "", encodings: str = "") -> Reply:
    """The page for a reading, in the format that `accept` prefers, compressed if `encodings` allows."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(AgentCollector(reading, read_process_use()))
    try:
        encode, content_type = choose_encoder(accept)
    except (ValueError, TypeError):  # a version that is no number: the plain format is understood by all
        encode, content_type = choose_encoder("")
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    body = encode(registry)
    if gzip_accepted(encodings):
        headers["Content-Encoding"] = "gzip"
        body = gzip.compress(body, GZIP_LEVEL, mtime=0)
    return Reply(body, 200, headers)
