"""The worker of a server that has a pace; see ``pacing``."""

from __future__ import annotations

import os
import time
from pathlib import Path

from vllm.v1.worker.cpu_worker import CPUWorker


class PacedWorker(CPUWorker):
    """vLLM's worker, which takes as long as the file says."""

    def execute_model(self, scheduler_output):
        """Execute the model as vLLM does, and sleep for what is left of the step's time."""
        least_s = float(Path(os.environ["PACE_FILE"]).read_text(encoding="utf-8")) / 1e3
        begin = time.monotonic()
        output = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            time.sleep(max(0, begin + least_s - time.monotonic()))
        return output
