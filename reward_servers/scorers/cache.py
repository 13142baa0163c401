"""Results of a scorer function, kept by content in a file of the run, so that a resumed run finds them again."""

import json
import logging
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("volley.reward")

BUSY_SECONDS = 5.0  # how long a worker waits while another one writes
SCHEMA = "CREATE TABLE IF NOT EXISTS results (at INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, result TEXT)"


class ResultCache:
    """The latest ``most`` results. All reward workers of a run use one file; use each instance in one thread.

    Scoring does not depend on it: if the file fails, as on a full disk, that is logged once and nothing is kept.
    """

    def __init__(self, file: Path, most: int) -> None:
        self._most = most
        self._database: sqlite3.Connection | None = None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(file, timeout=BUSY_SECONDS)
            with self._database:
                self._database.execute(SCHEMA)
        except (OSError, sqlite3.Error) as problem:
            self._give_up(problem)

    def get(self, key: str) -> list[dict[str, Any]] | None:
        """The result kept under ``key``, or None."""
        if self._database is None:
            return None
        try:
            row = self._database.execute("SELECT result FROM results WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as problem:
            self._give_up(problem)
            return None
        return None if row is None else list(json.loads(row[0]))

    def put(self, results: Mapping[str, list[dict[str, Any]]]) -> None:
        """Keep ``results`` by key, in one transaction; the oldest beyond the bound are removed."""
        if self._database is None or not results:
            return
        rows = [(key, json.dumps(result)) for key, result in results.items()]
        try:
            with self._database:
                self._database.executemany("INSERT OR REPLACE INTO results (key, result) VALUES (?, ?)", rows)
                self._database.execute(
                    "DELETE FROM results WHERE at <= (SELECT max(at) FROM results) - ?", (self._most,)
                )
        except sqlite3.Error as problem:
            self._give_up(problem)

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._database is not None:
            self._database.close()
            self._database = None

    def _give_up(self, problem: Exception) -> None:
        log.warning("results of the scorer function are kept no longer: %s: %s", type(problem).__name__, problem)
        self.close()
