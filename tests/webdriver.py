"""A browser without a window, driven through its WebDriver: just what the page's test needs."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that the standard gives to elements
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
]


def installed():
    """The browser and its driver, or None if one of them is missing."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for name in names if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """A session; its methods are the standard's commands."""

    def __init__(self, port, browser, profile):
        self.address = f"http://127.0.0.1:{port}/session"
        arguments = [*ARGUMENTS, f"--user-data-dir={profile}", "--window-size=1000,900"]
        options = {"binary": browser, "args": arguments}
        capabilities = {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}
        self.address += "/" + self.call("", {"capabilities": capabilities})["sessionId"]

    def call(self, path, body=None, method=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from error

    def open(self, address):
        self.call("/url", {"url": address})

    def run(self, script, *arguments):
        return self.call("/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script, seconds=60):
        """Waits until a script returns something true, and returns it."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"{script} stayed {value!r}; the page says {self.text('#status')!r}"
            time.sleep(0.1)
        return value

    def find(self, selector):
        return self.call("/element", {"using": "css selector", "value": selector})

    def text(self, selector):
        return self.call(f"/element/{self.find(selector)[ELEMENT]}/text")

    def click(self, selector):
        self.call(f"/element/{self.find(selector)[ELEMENT]}/click", {})

    def keys(self, selector, keys):
        self.call(f"/element/{self.find(selector)[ELEMENT]}/value", {"text": keys})

    def draw(self, selector, points):
        """Presses the pointer at the first point, moves along the others and lifts it; from the element's center."""
        element = self.find(selector)
        moves = [
            {"type": "pointerMove", "duration": 20, "origin": element, "x": round(x), "y": round(y)} for x, y in points
        ]
        actions = [moves[0], {"type": "pointerDown", "button": 0}, *moves[1:], {"type": "pointerUp", "button": 0}]
        pointer = {"type": "pointer", "id": "pen", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self.call("/actions", {"actions": [pointer]})

    def drop(self, paths):
        """Drops files and folders in the middle of the page."""
        data = {"items": [], "files": list(map(str, paths)), "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            event = {"type": kind, "x": 300, "y": 300, "data": data}
            self.call("/goog/cdp/execute", {"cmd": "Input.dispatchDragEvent", "params": event})

    def errors(self):
        """What the page wrote to its console in red."""
        return [row["message"] for row in self.call("/se/log", {"type": "browser"}) if row["level"] == "SEVERE"]


@contextlib.contextmanager
def browsing(profile):
    """A browser of a new profile, gone afterwards."""
    browser, driver = installed()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _await(port)
            session = Browser(port, browser, profile)
            try:
                yield session
            finally:
                session.call("", method="DELETE")
        finally:
            process.terminate()


def _await(port):
    for _ in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise AssertionError("chromedriver does not answer")
