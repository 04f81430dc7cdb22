"""Spans and metrics of a spool, handed to OpenTelemetry's exporters."""

__all__: list[str] = []
