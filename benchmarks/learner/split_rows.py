"""Memory of a rank for one long row, by the number of ranks that split it (`learner.sequence_parallel`).

    OMP_NUM_THREADS=1 python -m benchmarks.learner.split_rows [--tokens 2048] [--ranks 1 2 4]

The model is that of `benchmarks.learner.memory` with as many heads as Qwen2.5-7B, and every rank has all its weights.
"kept" are the tensors that PyTorch saves for the backward pass; "resident" is by how much the process grows at most
during a forward and backward pass.
"""

import argparse
import resource
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.learner.memory import kept_bytes, narrow_model, row_of
from learner.engine import join_ranks
from learner.policy import Policy, checkpoint_layers
from learner.sequence import ATTENTION, split_rows
from volley.memory import resident_memory
from volley.update import LearnerSpec

HEADS = {"num_attention_heads": 28, "num_key_value_heads": 4}
GIB = 1 << 30


def run_rank(rank: int, ranks: int, tokens: int, checkpointed: bool, folder: Path) -> None:
    """Run one pass, and leave what it took in ``folder``."""
    store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
    join_ranks(rank, ranks, store, cuda=False, deadline_s=600.0)
    lm = narrow_model("sdpa", **HEADS)
    if checkpointed:
        checkpoint_layers(lm)
    split = split_rows(rank, LearnerSpec(ranks=ranks, sequence_parallel=ranks), 600.0)
    if split is not None:
        lm.set_attn_implementation(ATTENTION)
    policy = Policy(lm, 1.0, split=split)
    kept_bytes(policy, row_of(64))  # what is there from the first use on, such as gradients, is not counted
    before = resident_memory()
    kept = kept_bytes(policy, row_of(tokens))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    torch.save((kept, peak - before), folder / f"{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    """Print one line per number of ranks and way of keeping activations, with the figures of the largest rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    print(f"one row of {options.tokens} tokens, bf16")
    for checkpointed in (False, True):
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory() as folder:
                arguments = (ranks, options.tokens, checkpointed, Path(folder))
                mp.spawn(run_rank, args=arguments, nprocs=ranks)  # type: ignore[attr-defined,no-untyped-call]
                figures = [torch.load(Path(folder, f"{rank}.pt")) for rank in range(ranks)]
            kept, grown = (max(each) / GIB for each in zip(*figures, strict=True))
            name = "checkpointed" if checkpointed else "kept whole"
            print(f"{name:12}  {ranks} rank(s): kept {kept:5.2f} GiB, resident {grown:5.2f} GiB more", flush=True)


if __name__ == "__main__":
    main()
