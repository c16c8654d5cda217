"""A web application on loopback, or on a unix socket: the embedded node's API, and servers of tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from aiohttp import web


@asynccontextmanager
async def serving(app: web.Application, path: Path | None = None, port: int = 0) -> AsyncIterator[int]:
    """Serve while the context is open; connections drop at its end. The port, 0 with a unix socket."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.UnixSite(runner, str(path)) if path else web.TCPSite(runner, "127.0.0.1", port)
    try:
        await site.start()
        yield 0 if path else runner.addresses[0][1]
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()
