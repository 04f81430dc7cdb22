"""A real vLLM server as a context manager that leaves nothing behind."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from stagetrace.attributes import SPOOL_VARIABLE
from stagetrace.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

MODEL_NAME: Final = "tiny"
"""The name the server gives its model."""

DEFAULT_ARGUMENTS: Final = (
    # Left alone, vLLM narrows to bfloat16, which a processor without AVX-512 emulates a hundred times slower.
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--max-num-seqs=16",
    '--limit-mm-per-prompt={"image":4,"video":0}',
    # Prefix caching off: repeated prompts must cost the same as new ones.  The processor cache stays on:
    # without either, vLLM names media by a counter instead of their content, and servers mix images up.
    "--no-enable-prefix-caching",
    f"--served-model-name={MODEL_NAME}",
)
"""Arguments of every server; the caller's come behind them and win."""

DEFAULT_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of every server: offline, silent towards the world, one compute thread."""


_HOST: Final = "127.0.0.1"
_POLL_S: Final = 0.2
_KILL_DEADLINE_S: Final = 10.0
_LOG_TAIL_BYTES: Final = 8192
_ERROR: Final = re.compile(r"[Ee]rror[:,] ")


class VllmServer:
    """A vLLM server on a loopback port, in a session of its own.

    Entering starts the server without waiting for it (so several can start side by side);
    leaving stops it and every process below it, whatever happened in between.

    Args:
        model: Folder of the model.
        log: File for the server's output; overwritten.
        arguments: Server arguments behind `DEFAULT_ARGUMENTS`; a repeated one replaces the default.
        spool: Folder that the plug-in records into; None switches recording off.
        environment: Variables on top of this process's own and `DEFAULT_ENVIRONMENT`.
        python: Interpreter of the environment that vLLM is installed in.
        port: Port to listen on; None takes a free one.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        arguments: Sequence[str] = (),
        spool: Path | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        port: int | None = None,
    ) -> None:
        self.model = model
        self.log = log
        self.port = _free_port() if port is None else port
        self._command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server"),
            *(f"--model={model}", f"--host={_HOST}", f"--port={self.port}"),
            *DEFAULT_ARGUMENTS,
            *arguments,
        ]
        self._environment = _server_environment(spool, environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base address, without a slash at the end."""
        return f"http://{_HOST}:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server; returns at once.

        Raises:
            ServerError: The interpreter cannot be run, or the server runs already.
        """
        if self._process is not None:
            raise ServerError("the server runs already", hint="stop it first")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise ServerError(f"cannot start {self._command[0]}: {error.strerror}") from error

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Wait until the server answers ``/health`` with 200.

        Raises:
            ServerError: It died, or was not ready after ``timeout_s`` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            self.check_alive()
            if time.monotonic() > deadline:
                raise self._failure(f"the server was not ready after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def check_alive(self) -> None:
        """Raise ServerError with the log's last words if the server has ended or never started."""
        if self._process is None:
            raise ServerError("the server was not started")
        if (code := self._process.poll()) is not None:
            raise self._failure(f"the server ended with {_describe_exit(code)}")

    def pids(self) -> tuple[int, ...]:
        """Return the ids of the server's live processes, itself included, in ascending order."""
        return tuple(sorted(process.pid for process in self._family()))

    def stop(self, grace_s: float = 15.0) -> None:
        """Ask the server to stop, and kill what is left of it after ``grace_s`` seconds.

        Does nothing if the server does not run.

        Raises:
            ServerError: A process survived being killed.
        """
        if self._process is None:
            return
        # Listed before it ends: a child in another session cannot be found once its parent is gone.
        family = self._family()
        try:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        finally:
            self._kill(family | self._family())
            self._process = None

    def _kill(self, family: frozenset[_Process]) -> None:
        """Send SIGKILL to the family, and to what it starts meanwhile, until nobody is left."""
        deadline = time.monotonic() + _KILL_DEADLINE_S
        while left := (family & _live_processes().keys()) | self._family():
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise ServerError(f"processes survived SIGKILL: {sorted(process.pid for process in left)}")
            time.sleep(_POLL_S / 10)
        if self._process is not None:
            self._process.wait()

    def _family(self) -> frozenset[_Process]:
        """Return the live processes of the server's session, and all their descendants."""
        if self._process is None:
            return frozenset()
        leader = self._process.pid
        alive = _live_processes()
        family = {process for process, place in alive.items() if leader in {process.pid, place.session}}
        while children := {
            process
            for process, place in alive.items()
            if process not in family and any(place.parent == member.pid for member in family)
        }:
            family |= children
        return frozenset(family)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _failure(self, what: str) -> ServerError:
        return ServerError(f"{what}: {_last_words(self.log)}", hint=f"its log is {self.log}")


class _Process(NamedTuple):
    """A process id with its start time, because the kernel gives ids away again."""

    pid: int
    start_ticks: int


class _Place(NamedTuple):
    parent: int
    session: int


def _live_processes() -> dict[_Process, _Place]:
    """Return every process that is not a zombie: those wait for a parent, and no signal moves them."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The name, second, may hold spaces and brackets; proc(5) counts the state as field 3.
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if fields[0] not in {"Z", "X"}:
                place = _Place(parent=int(fields[1]), session=int(fields[3]))
                found[_Process(int(entry.name), start_ticks=int(fields[19]))] = place
    return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port: int = listener.getsockname()[1]
    return port


def _server_environment(spool: Path | None, extra: Mapping[str, str]) -> dict[str, str]:
    # The server fetches images from this host; a proxy of the surroundings must not come between.
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), _HOST)))
    environment = {
        **os.environ,
        **DEFAULT_ENVIRONMENT,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }
    environment.pop(SPOOL_VARIABLE, None)
    if spool is not None:
        environment[SPOOL_VARIABLE] = str(spool)
    return environment | dict(extra)


def _describe_exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _last_words(log: Path) -> str:
    """Return the last line of the log that states an error, else the last that is not blank."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            tail = file.read().decode(errors="replace")
    except OSError:
        return "no log"
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    # Python's own remarks at exit often follow the error that ended the server.
    errors = [line for line in lines if _ERROR.search(line)]
    return (errors or lines or ["the log is empty"])[-1]
