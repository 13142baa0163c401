"""Volley: reinforcement learning for language models that get k tries.

The shared vocabulary of the service: objectives, job files, and the records that cross process borders.
Imports numpy and pydantic only.
"""
