"""Predict what a job needs and how fast it runs on given hardware: the arithmetic of ``volley plan``.

machine   what the hardware can do: presets, files of measured rates
memory    bytes per learner rank, per GPU of an actor, on a host
stages    seconds per step of generation, scoring, training and publishing
split     how many of the GPUs to give to actors and to learner ranks
report    all of it for one job, and what to change first

Nothing is measured here. README.md has every formula and constant.
"""
