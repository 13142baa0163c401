"""A warning when gradient clipping, which is there for outliers, sets the size of most steps."""

from collections import deque
from statistics import median

WINDOW = 20  # steps


class ClippedSteps:
    """Watches the last steps of a run, and warns once.

    Args:
        clip_norm: the job's ``optimizer.clip_norm``.
    """

    def __init__(self, clip_norm: float | None) -> None:
        self._clip_norm = clip_norm
        self._recent: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._warned = False

    def note(self, clipped_share: float, grad_norm: float) -> str:
        """Count one more step; returns the warning when over half of the last 20 steps were clipped, otherwise ""."""
        self._recent.append((clipped_share, grad_norm))
        clipped = sum(share for share, _ in self._recent)
        if self._warned or len(self._recent) < WINDOW or clipped <= WINDOW / 2:
            return ""
        self._warned = True
        usual = median(norm for _, norm in self._recent)
        return (
            f"{clipped:.0f} of the last {WINDOW} steps were clipped at optimizer.clip_norm {self._clip_norm:g}: such "
            "steps are all of one size, whatever signal their batches carry. Write clip_norm: null, or a few times the "
            f"usual gradient norm, which was {usual:.3g}"
        )
