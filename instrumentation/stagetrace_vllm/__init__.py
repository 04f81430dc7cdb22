"""Stage tracing inside a vLLM server: a plug-in of the group ``vllm.general_plugins``.

It is active when ``STAGETRACE_SPOOL`` names a folder and inert otherwise.
"""

from stagetrace_vllm.plugin import activate, deactivate

__all__ = ["activate", "deactivate"]
