"""A stand-in for ``torch.cuda`` where no device is: it gets as far as the script says."""

from __future__ import annotations


class ScriptedEvent:
    """An event that is reached when the script says so."""

    def __init__(self, cuda):
        self._cuda = cuda
        self.at = None

    def record(self):
        """Stand in the queue of the device."""
        self.at = len(self._cuda.recorded)
        self._cuda.recorded.append(self)

    def query(self):
        """Whether the device has got here; a capture does not survive the question."""
        assert not self._cuda.capturing
        if self._cuda.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.at < self._cuda.reached

    def elapsed_time(self, end):
        """So many milliseconds for each event between."""
        assert self.query()
        assert end.query()
        return (end.at - self.at) * self._cuda.event_ms


class ScriptedCuda:
    """Stands in for ``torch.cuda``: a device that gets as far as it is told."""

    def __init__(self):
        self.recorded, self.made, self.event_ms = [], 0, 1.0
        self.reached, self.capturing, self.broken = 0, False, False

    def Event(self, *, enable_timing):  # noqa: N802 - torch's name
        """Make an event."""
        assert enable_timing
        self.made += 1
        return ScriptedEvent(self)

    def is_current_stream_capturing(self):
        """Whether a graph is captured."""
        return self.capturing
