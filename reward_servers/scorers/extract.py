"""Extracts the program from a sample, line by line without regular expressions, so that the time is always linear."""

FENCE = "```"


def program_in(text: str, how: str) -> str | None:
    """Return the sample's program, or None: the whole text if ``how`` is ``raw``, else its last closed fenced block."""
    if how == "raw":
        return text if text.strip() else None
    return last_fenced_block(text)


def last_fenced_block(text: str) -> str | None:
    """Return the last block between two lines that begin with three backticks; None if it is missing or blank."""
    last: str | None = None
    block: list[str] | None = None
    for line in text.splitlines():
        if line.lstrip().startswith(FENCE):
            if block is None:
                block = []
            else:
                last, block = "\n".join(block) + "\n", None
        elif block is not None:
            block.append(line)
    return last if last is None or last.strip() else None
