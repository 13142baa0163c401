"""Sampling and scoring a set of prompts, and what is estimated from the samples.

evaluate    n samples of every prompt             estimates   pass@k, maj@k and their intervals
sample_log  samples on disk, for resumed runs     rejection   the samples that rejection sampling keeps
fetch       objects from Ray's object store
"""
