"""A TCP tunnel: agents dial out to a server, many streams share each link, draining loses nothing."""

__version__ = "0.1.0"
