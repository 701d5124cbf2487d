"""Whether new work should be sent to a program, and what speaks against it: the answer behind a readiness probe.

This file must not know who asks, or how.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Readiness:
    """``reasons`` are words for people and machines; there are none if ``ready``, but for ``fallback_only``."""

    ready: bool
    reasons: tuple[str, ...]

    @classmethod
    def of(cls, **against: bool) -> Readiness:
        """From what would speak against it, by its word, and whether it holds."""
        reasons = tuple(word for word, holds in against.items() if holds)
        return cls(not reasons, reasons)
