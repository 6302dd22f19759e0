"""A headless Chromium, driven by its DevTools protocol through pipes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium")
START_SECONDS = 90.0
PATIENCE_SECONDS = 60.0
ARTEFACTS = Path(__file__).parents[2] / "artefacts"

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


def row(service: str) -> str:
    """An expression: the row of a service, as text; empty while there is none."""
    rows = "[...document.querySelectorAll('tr.row')]"
    return f"({rows}.find(row => row.textContent.includes({service!r}))?.textContent || '')"


def text(selector: str) -> str:
    """An expression: the text of an element."""
    return f"document.querySelector({selector!r}).textContent"


def name_of(service: str) -> str:
    """An expression: the name that opens a service, of which this is a part."""
    names = "[...document.querySelectorAll('.open')]"
    return f"{names}.find(name => name.textContent.includes({service!r}))"


class Browser:
    """One tab. `faults` are errors of the console, exceptions, and requests to anywhere but loopback."""

    def __init__(self, pipe: tuple[asyncio.StreamReader, asyncio.BaseTransport], tells: int) -> None:
        (self._reader, self._transport), self._tells = pipe, tells
        self._number, self._session = 0, ""
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.faults: list[str] = []

    async def attach(self) -> None:
        """Take the first tab, once the browser answers."""
        tabs: list[str] = []
        while not tabs:  # the first one may take a moment
            targets = (await self.call("Target.getTargets"))["targetInfos"]
            tabs = [target["targetId"] for target in targets if target["type"] == "page"]
        (tab, *_) = tabs
        attached = await self.call("Target.attachToTarget", targetId=tab, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def listen(self) -> None:
        """Hear what the browser says, until it ends."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                said = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if said.get("id") in self._waiting:
                    self._waiting.pop(said["id"]).set_result(said)
                else:
                    self._note(said.get("method", ""), said.get("params", {}))

    def close(self) -> None:
        """Let the pipe go."""
        self._transport.close()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result; AssertionError when the browser refuses it."""
        self._number += 1
        answer = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        command: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._tells, json.dumps(command).encode() + b"\0")
        said = await asyncio.wait_for(answer, START_SECONDS)
        assert "error" not in said, (method, said["error"])
        result: dict[str, Any] = said["result"]
        return result

    async def open(self, url: str) -> None:
        """Go to a page."""
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression gives; a promise is awaited."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Return once an expression is true; AssertionError when it never is."""
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE_SECONDS
        while loop.time() < end:
            with contextlib.suppress(AssertionError):  # the page may not be there yet
                if await self.value(f"Boolean({expression})"):
                    return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {expression}; faults: {self.faults}")

    async def size(self, width: int, height: int, *, phone: bool = False) -> None:
        """The window's size in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    async def prefers(self, scheme: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def key(self, key: str, code: str = "") -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        number = {"Enter": 13, "Tab": 9, "Escape": 27}.get(key, 0)
        more: dict[str, Any] = {"windowsVirtualKeyCode": number} if number else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=code or key, **text, **more)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=code or key, **more)

    async def picture(self, name: str, *, whole: bool = False) -> Path:
        """A screenshot among the artefacts."""
        taken = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        ARTEFACTS.mkdir(exist_ok=True)
        path = ARTEFACTS / f"page-{name}.png"
        path.write_bytes(base64.b64decode(taken["data"]))
        return path

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.faults.append(str(said["exceptionDetails"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.faults.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning"):
            self.faults.append(str(said["args"]))
        elif method == "Network.requestWillBeSent":
            url = said["request"]["url"]
            if not url.startswith(("http://127.", "http://localhost:", "data:")):
                self.faults.append(f"asked {url}")


@contextlib.asynccontextmanager
async def browser(*, prefix: tuple[str, ...] = ()) -> AsyncIterator[Browser]:
    """A browser with an empty profile; it and all its processes end with the context.

    `prefix` is a command line that starts it elsewhere, such as in a network namespace: it is driven through
    pipes, not through a port.
    """
    assert PROGRAM is not None
    hears, tells = os.pipe()
    hear, tell = os.pipe()
    with tempfile.TemporaryDirectory(prefix="vipd-browser-", ignore_cleanup_errors=True) as profile:
        argv = (*prefix, PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank")
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", f'exec "$@" 3<&{hears} 4>&{tell}', "browser", *argv),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=(hears, tell),
            start_new_session=True,
        )
        os.close(hears)
        os.close(tell)
        found = Browser(await _reader(hear), tells)
        listening = asyncio.create_task(found.listen())
        try:
            await asyncio.wait_for(found.attach(), START_SECONDS)
            yield found
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            os.close(tells)
            found.close()


async def _reader(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(descriptor))
    return reader, transport
