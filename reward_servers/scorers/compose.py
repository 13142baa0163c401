"""``sum``: a weighted sum of scorers, format terms and length terms, optionally clamped."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from reward_servers.scorers.base import Scorer
from volley.records import Prompt, Verdict, VerdictStatus
from volley.scoring import FormatTerm, HttpScorer, LengthTerm, PythonScorer, SumScorer


class Sum:
    """Sums the rewards; the first term sets status, answer and rank. If a term gives no reward, the sum has none.

    Terms that wait for another process or a server score at the same time, each in a thread. The others stay in the
    caller's thread, with which their sandboxes would end.
    """

    def __init__(self, spec: SumScorer, build: Callable[..., Scorer]) -> None:
        self._spec = spec
        self._scorers = [build(term.scorer) for term in spec.terms]
        self._waiting = {i for i, term in enumerate(spec.terms) if isinstance(term.scorer, PythonScorer | HttpScorer)}
        self._threads = ThreadPoolExecutor(max(1, len(self._waiting)))

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        waiting = {i: self._threads.submit(self._scorers[i].score, prompt, texts) for i in self._waiting}
        here = {i: each.score(prompt, texts) for i, each in enumerate(self._scorers) if i not in waiting}
        columns = [here[i] if i in here else waiting[i].result() for i in range(len(self._scorers))]
        return [self._combine(row) for row in zip(*columns, strict=True)]

    def _combine(self, verdicts: Sequence[Verdict]) -> Verdict:
        failed = next((verdict for verdict in verdicts if verdict.reward is None), None)
        if failed is not None:
            return failed
        total = sum(term.weight * (v.reward or 0.0) for term, v in zip(self._spec.terms, verdicts, strict=True))
        if self._spec.minimum is not None:
            total = max(total, self._spec.minimum)
        if self._spec.maximum is not None:
            total = min(total, self._spec.maximum)
        return replace(
            verdicts[0],
            reward=total,
            unsafe=any(verdict.unsafe for verdict in verdicts),
            weak_oracle=any(verdict.weak_oracle for verdict in verdicts),
        )

    def close(self) -> None:
        for scorer in self._scorers:
            scorer.close()
        self._threads.shutdown(wait=False)


class Length:
    """1 up to ``start`` characters, 0 from ``end`` on, linear in between."""

    def __init__(self, spec: LengthTerm) -> None:
        self._spec = spec

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        return [_graded(self._reward(len(text))) for text in texts]

    def _reward(self, length: int) -> float:
        return min(1.0, max(0.0, (self._spec.end - length) / (self._spec.end - self._spec.start)))

    def close(self) -> None:
        """Nothing to end."""


class Format:
    """1 if the sample contains all the given texts in order, else 0."""

    def __init__(self, spec: FormatTerm) -> None:
        self._spec = spec

    def score(self, prompt: Prompt, texts: Sequence[str]) -> list[Verdict]:
        return [_graded(float(self._holds(text))) for text in texts]

    def _holds(self, text: str) -> bool:
        at = 0
        for piece in self._spec.contains:
            found = text.find(piece, at)
            if found < 0:
                return False
            at = found + len(piece)
        return True

    def close(self) -> None:
        """Nothing to end."""


def _graded(reward: float) -> Verdict:
    return Verdict(VerdictStatus.PASSED if reward >= 1 else VerdictStatus.WRONG_ANSWER, reward)
