"""Stage tracing and wait analysis for multimodal LLM serving."""
