"""The learner on a GPU, as one command: `python -m benchmarks.gpu.learner [--size 1.5B] [--out FOLDER] [SECTIONS]`.

Needs torch, transformers, DeepSpeed, pydantic; neither Ray nor vLLM. Models are random and made on the spot. About ten
minutes on one GPU. `--device cpu --size tiny` tries every line in a minute, and its figures say nothing.
"""

from benchmarks.gpu.sections import Benchmark, main

LEARNER = Benchmark("learner", "The learner", ("exactness", "group", "publishing", "checkpoints", "throughput"), 240)

if __name__ == "__main__":
    main(LEARNER, __doc__)
