"""The program ``tunnel``, also as ``python -m tunnel``.

A signal must not find it half loaded, so this file takes care of them before it imports anything that takes time.
"""

from __future__ import annotations

from tunnel import early


def main() -> None:
    """Run the program; does not return."""
    early.hold()
    try:
        from tunnel import cli

        cli.main()
    finally:
        early.ignore()


if __name__ == "__main__":
    main()
