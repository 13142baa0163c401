"""The patterns of names in requests and jobs, each with the words that an error uses in its place."""

from collections.abc import Mapping
from typing import Any

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
LONG_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
ENTRY_ID = r"^[0-9]{1,15}-[0-9]{1,9}$"
KEY = r"^[!-~]{1,200}$"
REVISION = r'^(\*|"?[0-9]{1,15}"?)$'
TAG = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}=[^\x00]{0,200}$"
TARGET = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
HTTP_URL = r"^https?://"
SERVER_URL = r"^(https?|wss?)://."

_NAME_WORDS = "letters from A to Z, digits, dots, hyphens and underscores, and begin with a letter or digit"
WORDS = {
    NAME: f"must be at most 64 {_NAME_WORDS}",
    LONG_NAME: f"must be at most 128 {_NAME_WORDS}",
    ENTRY_ID: "must be an id from an answer, such as 1767225600000-0",
    KEY: "must be 1 to 200 ASCII characters without spaces",
    REVISION: "must be a revision, such as 3, or *",
    TAG: f"must be KEY=VALUE; the key must be at most 64 {_NAME_WORDS}, the value at most 200 characters",
    TARGET: "must name a function, as in package.module:function",
    HTTP_URL: "must be a URL that begins with http:// or https://",
    SERVER_URL: "must be a URL that begins with http://, https://, ws:// or wss://",
}


def pattern_words(problem: Mapping[str, Any]) -> str:
    """What a value must be that does not match its pattern, and the value; for one error of pydantic's."""
    wanted = WORDS.get(str(problem["ctx"]["pattern"]), str(problem["msg"]))
    return f"{wanted}, not {problem['input']!r:.80}"
