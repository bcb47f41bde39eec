"""The stage for the Python clients: `stage.mjs` holds the provider and Traygate."""

import json
import os
import subprocess
import time
import urllib.request
from itertools import count
from pathlib import Path

import httpx
import httpx2
import pytest

HERE = Path(__file__).parent
DIRECT = os.environ.get("SDK_DIRECT") == "1"
TEXT = "The answer is forty-two 🦀."
TOOL_TEXT = "It is sunny in Paris."
EVENT_ERROR = "scripted failure in mid-stream"
# What the SDKs let through as it is where a body breaks off in mid-stream.
TRANSPORT_ERRORS = (httpx.TransportError, httpx2.TransportError)

through_traygate = pytest.mark.skipif(DIRECT, reason="needs Traygate between")
_nonces = count()


class Stage:
    """Where the clients call, and what the provider and the log know of it."""

    def __init__(self, addresses):
        self.openai = addresses["openai"]
        self.anthropic = addresses["anthropic"]
        self._breakable = iter(addresses["breakable"])
        self._provider = addresses["provider"]
        self._log = addresses.get("calls")

    def breakable(self):
        """The addresses of a provider that no other test uses."""
        return next(self._breakable)

    def calls(self, needle):
        """The provider's calls whose body holds `needle`."""
        with urllib.request.urlopen(self._provider) as answer:
            return [call for call in json.load(answer) if needle in call["body"]]

    def row(self, call_id):
        """The log's row of a call once it has ended."""

        def settled():
            text = subprocess.run(self._log, capture_output=True, check=True, text=True).stdout
            rows = map(json.loads, text.splitlines())
            return next((row for row in rows if row["id"] == call_id and row["outcome"] != "open"), None)

        return until("the call's row", settled)


def until(what, probe, within=3.0):
    """Waits until `probe` gives something true, and gives that."""
    deadline = time.monotonic() + within
    while True:
        found = probe()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what}: not within {within} s"
        time.sleep(0.02)


def fresh_prompt():
    """A prompt that nobody has sent before: no kept answer stands in for the provider's."""
    return f"prompt {os.getpid()}-{time.time_ns()}-{next(_nonces)}-end"


@pytest.fixture(scope="module")
def stage():
    process = subprocess.Popen(
        ["node", str(HERE / "stage.mjs")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert line, f"stage.mjs ended with {process.wait()}"
        yield Stage(json.loads(line))
    finally:
        process.stdin.close()
        assert process.wait(timeout=30) == 0
