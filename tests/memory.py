"""How much memory a call takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def memory_used(call: Callable[[], object]) -> int:
    """Bytes at most, while it ran."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
