"""Lets the Ray workers of actors and ranks be forked: the script that Ray starts, and how a head learns of it."""

PRELOAD = ("services.stack.preload",)  # what the server imports that forks them
