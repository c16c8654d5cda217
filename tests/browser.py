"""A page in headless Chromium (Debian's, installed where it is missing), by its DevTools protocol."""

import itertools
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import pytest

from agent.kubectl.page import Page
from tests.cluster.build.errors import BuildError
from tests.pace import scaled
from tests.pictures import chromium

START_SECONDS, ANSWER_SECONDS = 60.0, 20.0


class Tab:
    """One tab. `requests` has the address of everything that it asked for, answered or not."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self._socket, self._session = socket, session
        self._numbers = itertools.count(100)
        self.requests: list[str] = []
        self.complaints: list[str] = []  # of the console, as of a policy that was not kept

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, "sessionId": self._session}
        await self._socket.send_str(json.dumps(message))
        with anyio.fail_after(ANSWER_SECONDS):
            while True:
                found = json.loads((await self._socket.receive()).data)
                self._note(found)
                if found.get("id") == number:
                    assert "error" not in found, found
                    result: dict[str, Any] = found["result"]
                    return result

    def _note(self, found: dict[str, Any]) -> None:
        match found.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(found["params"]["request"]["url"])
            case "Log.entryAdded":
                self.complaints.append(found["params"]["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(found["params"]))

    async def open(self, address: str) -> None:
        for domain in ("Network", "Log", "Runtime", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=address)

    async def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str, seconds: float = 30.0) -> float:
        """Wait until an expression is true; the seconds that it took."""
        began = anyio.current_time()
        with anyio.move_on_after(scaled(seconds)):
            while not await self.value(script):
                await anyio.sleep(0.02)
            return anyio.current_time() - began
        shown = await self.value("document.body.innerText")
        late = f"not within {scaled(seconds):g} s: {script}"
        raise TimeoutError(f"{late}; the page shows:\n{shown}\n{self.complaints}")

    async def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


@asynccontextmanager
async def served(ask: Callable[[], Any]) -> AsyncIterator[Page]:
    """The page of `kubectl gpu` over what `ask` answers; it ends in a thread, since it waits for its own."""
    page = Page(ask).__enter__()
    try:
        yield page
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(page.__exit__, None, None, None)


@asynccontextmanager
async def browser(dark: bool = False) -> AsyncIterator[Tab]:
    """A fresh browser with one empty tab."""
    try:
        await anyio.to_thread.run_sync(chromium.ready)
    except BuildError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    with tempfile.TemporaryDirectory(prefix="gna-chromium-", ignore_cleanup_errors=True) as folder:
        process = await anyio.to_thread.run_sync(_started, folder)
        assert process.stderr is not None
        try:
            with anyio.fail_after(START_SECONDS):
                address = await anyio.to_thread.run_sync(_listening, process)
            async with (
                aiohttp.ClientSession() as http,
                http.ws_connect(address, max_msg_size=0) as socket,
            ):
                tab = Tab(socket, await _attached(socket))
                if dark:
                    feature = {"name": "prefers-color-scheme", "value": "dark"}
                    await tab.call("Emulation.setEmulatedMedia", features=[feature])
                yield tab
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its helpers, too
            process.wait()
            process.stderr.close()


def _started(folder: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [
            chromium.PROGRAM,
            "--no-sandbox",  # root cannot use it in a container; the pages are this project's own
            "--disable-gpu",
            "--remote-debugging-port=0",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            f"--user-data-dir={folder}",
            "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _listening(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if "DevTools listening on " in line:
            return line.split("listening on ")[1].strip()
    raise RuntimeError(f"{chromium.PROGRAM} ended with {process.wait()}")


async def _attached(socket: aiohttp.ClientWebSocketResponse) -> str:
    """The session of a new tab."""
    answers: dict[int, dict[str, Any]] = {}

    async def ask(number: int, method: str, **parameters: Any) -> dict[str, Any]:
        await socket.send_str(json.dumps({"id": number, "method": method, "params": parameters}))
        with anyio.fail_after(ANSWER_SECONDS):
            while number not in answers:
                found = json.loads((await socket.receive()).data)
                answers[found.get("id", 0)] = found.get("result", {})
        return answers[number]

    target = (await ask(1, "Target.createTarget", url="about:blank"))["targetId"]
    return str((await ask(2, "Target.attachToTarget", targetId=target, flatten=True))["sessionId"])
