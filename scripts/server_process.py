"""mlx-lm's HTTP server as a child process, with omlxd or without. For the chat demo and the server tests."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 30.0
ANSWER_SECONDS: Final = 300.0
POLL_SECONDS: Final = 0.05

Message = dict[str, str]


class ServerFailedError(RuntimeError):
    """It did not start; the message ends with what it wrote."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the server."""

    text: str
    ttft_s: float
    """From the request to the first piece of text, in seconds."""
    prompt_tokens: int
    reused: int
    """Prompt tokens that the server had in a cache."""


class ServerProcess:
    """A server for one model folder on a free port of the loopback interface."""

    def __init__(self, folder: Path, environment: Mapping[str, str], log: Path, *flags: str, kept: bool = True) -> None:
        """``kept``: with omlxd. ``flags`` are the server's."""
        self._folder = folder
        self._environment = {**environment, "HF_HUB_OFFLINE": "1"}
        self._log = log
        self._flags = flags
        self._module = ["omlxd.engines.mlx_lm_server"] if kept else ["mlx_lm", "server"]
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it answers, as OpenAI's clients want it."""
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        """Start it and wait until it answers. Raises :class:`ServerFailedError`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", *self._module, "--model", str(self._folder), "--port", str(self.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._flags],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    words = self._log.read_text(errors="replace")[-2000:]
                    raise ServerFailedError(f"the server did not start:\n{words}") from None
                time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def ask(self, messages: Sequence[Message], count: int) -> Turn:
        """Ask for an answer of at most ``count`` tokens, greedy and streamed."""
        request = urllib.request.Request(
            f"{self.url}/chat/completions",
            json.dumps(
                {
                    "messages": messages,
                    "max_tokens": count,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
            ).encode(),
            {"Content-Type": "application/json"},
        )
        begun = time.perf_counter()
        first, parts, usage = 0.0, [], {}
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
            for event in _events(response):
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        first = first or time.perf_counter() - begun
                        parts.append(text)
                usage = event.get("usage") or usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Turn("".join(parts), first, usage["prompt_tokens"], cached)


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """Server-sent events."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))
