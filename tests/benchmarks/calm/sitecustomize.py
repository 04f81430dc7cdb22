"""Makes vLLM's processes sleep where they would spin, so that their CPU time is work.

On the CPU, the engine core and the worker poll their shared-memory queue for a
second after every read; a process's CPU time then says how long it lived, not
what it did.  Both arms of the benchmark run with this on ``PYTHONPATH``.
"""

import time

from stagetrace_vllm.imports import ImportWatcher


def _calm(module):
    module.sched_yield = lambda: time.sleep(0.0005)


ImportWatcher({"vllm.distributed.device_communicators.shm_broadcast"}, _calm).start()
