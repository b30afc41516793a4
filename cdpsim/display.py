"""Text that users chose, as one line that a terminal, a table or a figure can show."""


def one_line(text: str, longest: int | None = None) -> str:
    r"""Escape what does not print, and cut what is longer than `longest` characters.

    Escaped are line breaks, control characters, marks that turn the direction of writing, and lone surrogates.

    >>> one_line("a\x1b[31m\u202eb\nc")
    'a\\x1b[31m\\u202eb\\nc'
    >>> one_line("a-long-name", 6)
    'a-lon…'
    """
    line = text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return line if longest is None or len(line) <= longest else f"{line[: longest - 1]}…"
