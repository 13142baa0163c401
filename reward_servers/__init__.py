"""Scoring: the scorers, the sandbox, the reward workers and the HTTP reward server."""
