"""A real browser for tests that look at a page."""

import json
import os
import select
import shutil
import subprocess

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """Chromium without a window, spoken to over a pipe: commands go in, events and answers come out."""

    FLAGS = (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--remote-debugging-pipe", "--disable-dev-shm-usage"),
    )

    def __init__(self, profile):
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # Chromium reads descriptor 3 and writes 4; a shell puts the pipes there.
        script = f'exec "$0" "$@" 3</dev/fd/{commands} 4>/dev/fd/{answers}'
        line = ["sh", "-c", script, CHROMIUM, *self.FLAGS, f"--user-data-dir={profile}"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(line, pass_fds=(commands, answers), **quiet)
        os.close(commands)
        os.close(answers)
        self.events, self._count, self._buffer, self._session = [], 0, b"", {}
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method, **params):
        """Send a command and wait for its answer; events that come first are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], 20)
            assert ready, "Chromium did not answer within 20 seconds"
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium ended"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        content = json.loads(message)
        if "method" in content:
            self.events.append(content)
        return content

    def open(self, path, *, width=1200, dark=False):
        """Load a file in a window of this width, and give what went wrong or out on the way."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        answer = self("Page.navigate", url=path.as_uri())
        assert "errorText" not in answer, answer
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return self.problems(path)

    def problems(self, path):
        found = []
        for event in self.events:
            name, params = event["method"], event["params"]
            if name == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if url != path.as_uri() and not url.startswith("data:"):
                    found.append(f"request: {url}")
            elif name in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
                found.append(f"{name}: {json.dumps(params)}")
        return found

    def evaluate(self, expression):
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self):
        os.close(self._write)  # end of input: Chromium leaves
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._read)
