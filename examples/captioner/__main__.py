"""Serve: ``python -m captioner --port 8000``."""

from __future__ import annotations

import argparse

import torch
import uvicorn

import stagetrace
from captioner.server import Settings, create_app


def main() -> None:
    """Read the command line and serve until told to stop."""
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="captioner", description="Captions images with random weights.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--decode-threads", type=int, default=defaults.decode_threads)
    parser.add_argument("--encoder-batch", type=int, default=defaults.encoder_batch)
    parser.add_argument("--seats", type=int, default=defaults.seats, help="captions written at a time")
    parser.add_argument("--max-requests", type=int, default=defaults.max_requests)
    parser.add_argument("--max-image-bytes", type=int, default=defaults.max_image_bytes)
    options = vars(parser.parse_args())
    host, port = options.pop("host"), options.pop("port")
    stagetrace.start(service="captioner")
    torch.set_num_threads(1)  # each model has a thread of its own
    uvicorn.run(create_app(Settings(**options)), host=host, port=port, log_level="warning")


if __name__ == "__main__":
    main()
