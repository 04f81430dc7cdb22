"""A middleware for the server under test that blocks its event loop when a header asks for it."""

from __future__ import annotations

import asyncio
import time

AFTER_S = 0.05


class BlockTheLoop:
    """Blocks the event loop a moment after a request came, for as long as its ``x-block-loop-ms`` says."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        """Have the loop blocked later, and answer as ever."""
        wanted = dict(scope.get("headers", ())).get(b"x-block-loop-ms")
        if wanted is not None:
            asyncio.get_running_loop().call_later(AFTER_S, time.sleep, int(wanted) / 1e3)
        await self.app(scope, receive, send)
