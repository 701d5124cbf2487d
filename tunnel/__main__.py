"""``python -m tunnel`` is the same program as ``tunnel``."""

from __future__ import annotations

from tunnel.cli import main

if __name__ == "__main__":
    main()
