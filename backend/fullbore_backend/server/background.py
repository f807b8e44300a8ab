"""A whole server beside the caller's own work, in a process of its own.

For tests, examples and benchmarks. Imports nothing of the engine: the caller's process stays light.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from ..errors import BackendError

READY = re.compile(r"\bready in [0-9.]+ s at (https?://\S+)")
"""The line by which ``fullbore serve`` says that it serves, and where."""


class BackgroundServer:
    """``fullbore serve`` on a free port; ready inside the ``with`` and gone after it.

    :param arguments: more flags for ``fullbore serve``.
    :param on_line: called, on a thread, with each line the server prints; ``None`` drops them.
    :param timeout: seconds to wait for it to be ready, the model's download included, and for it to
        end after it was told to.
    :param environment: variables set on top of the caller's.
    """

    def __init__(
        self,
        arguments: Sequence[str] = (),
        *,
        on_line: Callable[[str], None] | None = None,
        timeout: float = 600.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self._arguments = list(arguments)
        self._on_line = on_line
        self._timeout = timeout
        self._environment = environment or {}
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._settled = threading.Event()
        self._last_lines: deque[str] = deque(maxlen=20)
        self._url: str | None = None

    @property
    def url(self) -> str:
        """``http://HOST:PORT``, without a path."""
        assert self._url is not None, "the server is not running"
        return self._url

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def __enter__(self) -> Self:
        """Start it, and wait until it is ready.

        :raises BackendError: it ended, or was not ready in time; with what it printed last.
        """
        command = [sys.executable, "-m", "fullbore_backend.cli", "serve", "--port", "0"]
        command.append("--until-eof")  # its input is ours to close, and closes if we are killed
        self._process = subprocess.Popen(
            [*command, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **self._environment},
            start_new_session=True,  # a Ctrl-C in the terminal is the caller's to handle
        )
        self._reader = threading.Thread(target=self._read, name="fullbore-server", daemon=True)
        self._reader.start()
        try:
            in_time = self._settled.wait(self._timeout)
            if self._url is None:
                why = "ended before it was ready" if in_time else "was not ready in time"
                said = "\n".join(self._last_lines)
                raise BackendError(f"the server {why}; it said:\n{said}")
        except BaseException:
            self._end(signal.SIGKILL)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop it: let running requests finish, or kill it if the block raised."""
        self._end(signal.SIGTERM if error is None else signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM, which drains it, and return at once."""
        assert self._process is not None, "the server is not running"
        self._process.terminate()

    def wait(self) -> int:
        """Wait until the process ends, and return its exit code.

        :raises subprocess.TimeoutExpired: it did not end in time.
        """
        assert self._process is not None, "the server is not running"
        return self._process.wait(self._timeout)

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._reader is not None
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self._process.send_signal(number)
            try:
                self._process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process.stdin.close()
        self._reader.join()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                text = line.rstrip("\n")
                self._last_lines.append(text)
                if self._url is None and (found := READY.search(text)):
                    self._url = found.group(1)
                    self._settled.set()
                if self._on_line is not None:
                    self._on_line(text)
        self._settled.set()
