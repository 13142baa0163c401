"""One supervised step of a rank, with cross-entropy on the answers' tokens."""

import time
from collections.abc import Sequence

from learner.batch import Packer
from learner.engine import Engine
from learner.layout import Piece
from learner.sums import Sums


def supervised_step(engine: Engine, pack: Packer, pieces: Sequence[Piece], step: int) -> dict[str, float]:
    """One step on the mean cross-entropy over the answer tokens of all ranks; returns metrics of all ranks."""
    begun = time.perf_counter()
    batches = pack(pieces)
    counted = Sums(engine.device, engine.copies)
    counted.add(tokens=sum(len(piece.tokens_T) for piece in pieces))
    tokens = counted.total()["tokens"]
    sums = Sums(engine.device, engine.copies)
    for number, batch in enumerate(batches, 1):
        logprob_T, entropy_T = engine(batch, last=number == len(batches))
        engine.backward(-logprob_T.sum() / tokens)
        sums.add(nll=-logprob_T.sum(), entropy=entropy_T.sum())
    grad_norm, rate = engine.update(step)
    total = sums.total()
    return {
        "loss": total["nll"] / tokens,
        "entropy": total["entropy"] / tokens,
        "tokens": tokens,
        "tokens_per_second": tokens / (time.perf_counter() - begun),
        "grad_norm": grad_norm,
        "clipped_share": float(engine.spec.clips(grad_norm)),
        "learning_rate": rate,
    }
