"""The operator's HTTP interface: health, drains, agents, metrics and a status page, over ``operate.py`` alone.

``serve.py`` listens, ``talk.py`` talks HTTP, ``site.py`` is what every request goes through, ``gate.py`` says who may
ask, ``health.py`` and ``app.py`` have the paths, ``openapi.py`` describes them. All but the first are loaded when
somebody comes.
"""
