"""Which clock and which event loop we run on, found once instead of at every use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio.lowlevel

Clock = Callable[[], float]
"""Seconds on a clock that never goes back; the one that deadlines are set by."""


def loop_clock() -> Clock:
    """The running event loop's own clock (``anyio.current_time`` without its look-ups)."""
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:
        import trio

        return trio.current_time


def loop_token() -> object:
    """Something that is equal in every task of one event loop and differs between loops.

    ``None`` outside of any.
    """
    try:
        return anyio.lowlevel.current_token()
    except Exception:  # anyio raises what the missing backend raises
        return None
