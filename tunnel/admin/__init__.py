"""The operator's HTTP interface: health, drain, agents, streams, metrics, the status page."""
