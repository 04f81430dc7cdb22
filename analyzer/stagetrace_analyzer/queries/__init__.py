"""Narrow questions to open datasets: one SQL file a question, a typed function around it."""
