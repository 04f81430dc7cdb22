"""Simulated truth: queues whose right answers are known, and datasets made of them."""
