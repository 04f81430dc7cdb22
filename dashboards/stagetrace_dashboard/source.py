"""What the dashboard shows: datasets and spools, opened, and opened again as they grow."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from stagetrace.errors import StagetraceError
from stagetrace_analyzer.commands.options import datasets_of
from stagetrace_analyzer.dataset import is_dataset
from stagetrace_dashboard.data import Data
from stagetrace_dashboard.scope import Scope

if TYPE_CHECKING:
    from stagetrace_analyzer.classes import ClassRules
    from stagetrace_dashboard.limits import Limits

Files = frozenset[tuple[str, int, int]]
_WHOLE = Scope()


class Source:
    """The data of some paths, as they were last read.

    A spool is read into a dataset in a temporary folder.  The state before the
    current one is kept, for questions that are still being asked.

    Attributes:
        limits: What a question may cost.
        data: The current state.
        problem: Why it could not be read again, None if it could.
    """

    def __init__(
        self, paths: Sequence[Path], rules: ClassRules, limits: Limits, scope: Scope = _WHOLE
    ) -> None:
        """Read the data.

        Raises:
            UsageError: A path is wrong.
            DataError: The data cannot be read.
        """
        self.limits = limits
        self.problem: str | None = None
        self._paths = tuple(paths)
        self._rules = rules
        self._scope = scope
        self._seen: Files = frozenset()
        self._read_files: Files = frozenset()
        self._next_spool_s = 0.0
        self._before: _State | None = None
        self._state = self._read(1)

    @property
    def data(self) -> Data:
        """The current state."""
        return self._state.data

    def close(self) -> None:
        """Close the data, and remove what was made of spools."""
        for state in (self._before, self._state):
            if state is not None:
                state.close()

    def refresh(self) -> bool:
        """Read again what has changed; return whether anything has.

        A dataset is read again when its files have changed and then stayed the same from
        one look to the next, because its tables are replaced one by one.  Whether
        a spool has grown is only seen by reading it, so that is done no more
        often than `Limits.spool_share` allows.
        """
        seen = _files(self._paths)
        has_changed = seen == self._seen and seen != self._read_files
        self._seen = seen
        if not (has_changed or self._is_spool_due()):
            return False
        try:
            new = self._read_news(has_changed=has_changed)
        except (StagetraceError, OSError) as error:
            self.problem = str(error)
            return False
        self.problem = None
        if new is None:
            return False
        before, self._before, self._state = self._before, self._state, new
        if before is not None:
            before.close()
        return True

    def _is_spool_due(self) -> bool:
        # Also a folder that is gone, so that this is told.
        has_others = any(not is_dataset(path) for path in self._paths)
        return has_others and time.monotonic() >= self._next_spool_s

    def _read_news(self, *, has_changed: bool) -> _State | None:
        """Read the data again, and make what the first page needs; None if nothing has come."""
        with ExitStack() as stack:
            new = self._read(self.data.number + 1)
            stack.callback(new.close)
            if not has_changed and new.data.has_same_requests(self.data):
                return None
            new.data.warm()
            stack.pop_all()
            return new

    def _read(self, number: int) -> _State:
        files, began_s = _files(self._paths), time.monotonic()
        try:
            with ExitStack() as stack:
                folders = stack.enter_context(datasets_of(self._paths))
                data = stack.enter_context(
                    closing(
                        Data(number, folders, time.time_ns(), self._rules, self.limits, scope=self._scope)
                    )
                )
                state = _State(data, stack.pop_all())
        finally:
            now_s = time.monotonic()
            pause_s = max(self.limits.poll_s, (now_s - began_s) / self.limits.spool_share)
            self._next_spool_s = now_s + pause_s
        self._read_files = files
        return state


class _State:
    """Open data, and what has to be removed with them."""

    def __init__(self, data: Data, stack: ExitStack) -> None:
        self.data = data
        self._stack = stack

    def close(self) -> None:
        self._stack.close()


class Follower:
    """A thread that keeps a source up to date."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stagetrace-follow", daemon=True)

    def start(self) -> None:
        """Begin to look every `Limits.poll_s`."""
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait until what is being read is read."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._source.limits.poll_s):
            self._source.refresh()


def _files(paths: Sequence[Path]) -> Files:
    """Return name, time of change and size of the files of all datasets."""
    return frozenset(file for path in paths if is_dataset(path) for file in _stats(path))


def _stats(dataset: Path) -> Iterator[tuple[str, int, int]]:
    for path in dataset.glob("*/*.parquet"):
        try:
            status = path.stat()
        except OSError:
            continue
        yield str(path), status.st_mtime_ns, status.st_size
