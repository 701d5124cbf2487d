"""The operator's HTTP interface: health, drains, agents, metrics and a status page, over ``operate.py`` alone.

``serve.py`` listens, ``talk.py`` talks HTTP, ``site.py`` is what every request goes through, ``app.py`` has the paths,
``openapi.py`` describes them. All but the first are loaded when somebody comes.
"""
