"""Finds the prompts of a training set that overlap with an evaluation set, exactly or by word n-grams.

Texts are normalised first. The overlap of a training prompt with an evaluation prompt is the share of the evaluation
prompt's distinct n-grams that the training prompt contains. n-grams are compared as 64-bit hashes, so a set of a
million words takes seconds.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from volley.records import Prompt

WORD = re.compile(r"\w+")
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication is a bijection on 64 bits


@dataclass(frozen=True, slots=True)
class Contaminated:
    """A training prompt that overlaps with the evaluation set.

    Attributes:
        index: its index in the training set.
        against: id of the evaluation prompt that it overlaps with most.
        overlap: share of that prompt's n-grams that it contains; 1.0 if they are equal after normalisation.
        exact: whether they are equal after normalisation.
    """

    index: int
    against: str
    overlap: float
    exact: bool


def words_of(text: str) -> list[str]:
    """Return the words of ``text``, case-folded and with compatibility forms unified, without punctuation."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def problem_text(prompt: Prompt) -> str:
    """Return the text to compare: the problem if a recipe provides it, so that shared instructions do not count."""
    problem = prompt.reference.get("problem")
    return problem if isinstance(problem, str) and problem else prompt.text


def find_contaminated(
    training: Iterable[str],
    evaluation: Sequence[str],
    names: Sequence[str],
    *,
    ngram: int = 8,
    threshold: float = 0.5,
) -> list[Contaminated]:
    """Return the training texts that overlap with an evaluation text by at least ``threshold``, in order.

    Args:
        names: ids of the evaluation texts.
        ngram: words per n-gram; a text with fewer words is only compared as a whole.
        threshold: share of an evaluation text's distinct n-grams, above 0 and up to 1.

    Raises:
        ValueError: ``ngram`` or ``threshold`` is out of range.
    """
    if ngram < 1 or not 0 < threshold <= 1:
        raise ValueError(f"ngram {ngram} must be 1 or more, and threshold {threshold} above 0 and at most 1")
    index = _Index(evaluation, ngram)
    found = []
    for number, text in enumerate(training):
        match = index.best(text)
        if match is not None and (match[2] or match[1] >= threshold):
            found.append(Contaminated(number, names[match[0]], match[1], match[2]))
    return found


class _Index:
    """The evaluation set's n-grams: sorted hashes, each with the text that contains it."""

    def __init__(self, texts: Sequence[str], ngram: int) -> None:
        self.ngram = ngram
        self._words: dict[str, int] = {}
        words = [words_of(text) for text in texts]
        self._whole: dict[str, int] = {}
        for number, each in enumerate(words):
            self._whole.setdefault(" ".join(each), number)
        self._whole.pop("", None)
        grams = [self._grams(each) for each in words]
        self._sizes = np.array([len(each) for each in grams], dtype=np.int64)
        owners = np.repeat(np.arange(len(grams)), self._sizes)
        flat = np.concatenate(grams) if grams else np.zeros(0, np.uint64)
        order = np.argsort(flat, kind="stable")
        self._grams_sorted, self._owners = flat[order], owners[order]

    def best(self, text: str) -> tuple[int, float, bool] | None:
        """Return (evaluation text, overlap, exact) of the closest text, or None if no n-gram is shared."""
        words = words_of(text)
        whole = self._whole.get(" ".join(words))
        if whole is not None:
            return whole, 1.0, True
        grams = self._grams(words)
        first = np.searchsorted(self._grams_sorted, grams, "left")
        last = np.searchsorted(self._grams_sorted, grams, "right")
        hit = np.flatnonzero(last > first)
        if not len(hit):
            return None
        owners = np.concatenate([self._owners[first[i] : last[i]] for i in hit.tolist()])
        numbers, counts = np.unique(owners, return_counts=True)
        shares = counts / self._sizes[numbers]
        closest = int(np.argmax(shares))
        return int(numbers[closest]), float(shares[closest]), False

    def _grams(self, words: Sequence[str]) -> NDArray[np.uint64]:
        """Return the distinct n-gram hashes, uint64: each is a polynomial in the hashes of its words."""
        count = len(words) - self.ngram + 1
        if count < 1:
            return np.zeros(0, np.uint64)
        known = self._words
        hashes = np.array([known.get(word) or self._hash(word) for word in words], dtype=np.uint64)
        grams = np.zeros(count, np.uint64)
        for offset in range(self.ngram):
            grams = grams * MULTIPLIER + hashes[offset : offset + count]
        return np.unique(grams)

    def _hash(self, word: str) -> int:
        value = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        self._words[word] = value
        return value
