"""Compose and operate: what runs a job from its file to its results."""
