"""The port of API and dashboard, unless told otherwise. 8265 would be that of Ray's own dashboard."""

DEFAULT_PORT = 8484
