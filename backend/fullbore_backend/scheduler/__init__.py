"""What each step computes, in pure Python: no torch, no I/O, no clock.

A step is a value: ``batch = scheduler.schedule()``, the runner turns it into tokens, and
``scheduler.apply(batch, tokens)`` takes them in.
"""

from .batch import Batch, Chunk
from .blocks import BlockPool
from .kv_cache import KVCache
from .paused import PausedSequences
from .prefix import PrefixCursor, PrefixIndex
from .running import RunningSequences
from .scheduler import Scheduler
from .sequence import Sequence
from .waiting import WaitingQueue

__all__ = [
    "Batch",
    "BlockPool",
    "Chunk",
    "KVCache",
    "PausedSequences",
    "PrefixCursor",
    "PrefixIndex",
    "RunningSequences",
    "Scheduler",
    "Sequence",
    "WaitingQueue",
]
