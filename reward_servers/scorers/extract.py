"""Finding the program in a sample. Line by line, no pattern: linear whatever the model writes."""

FENCE = "```"


def program_in(text: str, how: str) -> str | None:
    """The sample's program: its last closed fenced block, or the whole text; None where there is none."""
    if how == "raw":
        return text if text.strip() else None
    return last_fenced_block(text)


def last_fenced_block(text: str) -> str | None:
    """Contents of the last block between two lines that begin with three backticks."""
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
