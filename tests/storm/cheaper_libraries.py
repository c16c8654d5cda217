"""Stand-ins in libraries that change nothing of what is seen in a storm, only what a step costs.

anyio asks at each call which event loop runs: asyncio's. hpack packs headers that only this process reads, as
both sides of gRPC are in it; hyperframe works out again for each frame which flags its kind has.
"""

import marshal
import sys
from collections.abc import Iterable

from anyio._backends._asyncio import AsyncIOBackend, CancelScope
from hpack import HeaderTuple
from hpack.hpack import Decoder, Encoder
from hyperframe.flags import Flag, Flags
from hyperframe.frame import Frame

_names: dict[int, tuple[Iterable[Flag], set[str]]] = {}


def _backend(asynclib_name: str | None = None) -> type[AsyncIOBackend]:
    del asynclib_name
    return AsyncIOBackend


def _encode(self: Encoder, headers: Iterable[tuple[bytes, bytes]], huffman: bool = True) -> bytes:
    del self, huffman
    return marshal.dumps([(name, value) for name, value in headers])


def _decode(self: Decoder, data: bytes, raw: bool = False) -> list[HeaderTuple]:
    del self
    assert raw  # as h2 asks
    return [HeaderTuple(*each) for each in marshal.loads(data)]


def _flags(self: Flags, defined_flags: Iterable[Flag]) -> None:
    known = _names.get(id(defined_flags))
    if known is None:
        known = _names[id(defined_flags)] = defined_flags, {flag.name for flag in defined_flags}
    self._valid_flags, self._flags = known[1], set()


def _repr(self: Frame) -> str:
    """Each frame is described for a log that nobody reads."""
    return type(self).__name__


def _cancel(self: CancelScope, reason: str | None = None) -> None:
    """See `CancelScope.cancel`, which describes the caller's task; nobody reads that either."""
    if not self._cancel_called:
        if self._timeout_handle:
            self._timeout_handle.cancel()
            self._timeout_handle = None
        self._cancel_called = True
        self._cancel_reason = f"Cancelled via cancel scope {id(self):x}; reason: {reason}"
        if self._host_task is not None:
            self._deliver_cancellation(self)


def install() -> None:
    """Put them in place, for this process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("anyio.") and hasattr(module, "get_async_backend"):
            module.get_async_backend = _backend  # type: ignore[attr-defined]
    CancelScope.cancel = _cancel  # type: ignore[method-assign]
    Frame.__repr__ = _repr  # type: ignore[method-assign]
    Encoder.encode = _encode  # type: ignore[method-assign,assignment]
    Decoder.decode = _decode  # type: ignore[method-assign]
    Flags.__init__ = _flags  # type: ignore[method-assign]
