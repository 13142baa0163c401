"""Volley on GPUs, as one command: `python -m benchmarks.gpu.all [--size 1.5B] [--out FOLDER] [SECTIONS]`.

The learner's sections, as in `benchmarks.gpu.learner`, and those that need Ray and vLLM too: an engine that generates
and changes weights in flight, types of models, whole runs with actor and learner on one GPU, at once and in turns,
another on two GPUs with the weights sent by NCCL, and TRL's trainer on the same model, prompts and lengths. Models are
random and made on the spot. `--device cpu --size tiny` tries every line in some minutes, and its figures say nothing.
"""

from benchmarks.gpu.learner import LEARNER
from benchmarks.gpu.sections import Benchmark, main

ALL = Benchmark(
    "all",
    "Volley",
    (*LEARNER.sections, "generation", "families", "whole_run", "turns", "two_devices", "versus_trl"),
    420,
)

if __name__ == "__main__":
    main(ALL, __doc__)
