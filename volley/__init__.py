"""Volley: reinforcement learning for language models that get k tries.

This package has what the other packages share: objectives, job files, and the records that pass between processes.
It imports only NumPy and pydantic; `volley.weight_group` imports torch when it is first used, and `volley.client`, with
which programs use the service, needs httpx.
"""
