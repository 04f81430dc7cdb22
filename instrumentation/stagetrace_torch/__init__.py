"""Stages of torch modules, timed by the device that runs them.

For servers that record with :mod:`stagetrace`.  torch is never imported: a
module comes from a host that has.
"""

from stagetrace_torch.timing import collect, timed, timed_batch

__all__ = ["collect", "timed", "timed_batch"]
