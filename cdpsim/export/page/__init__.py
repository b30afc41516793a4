"""One HTML file in which one run, or two, can be explored: it opens from disk and needs no network.

The columns of the runs become small integers: times and sizes are places in tables of all different values, and the
start of a bar is its distance from the end of the bar before it. They are squeezed into one inert element, which the
scripts draw.
"""

import hashlib
import re
import zlib
from base64 import b64encode
from collections.abc import Iterator
from importlib.resources import files

import msgspec

from cdpsim.draw.views import Views, plain_title
from cdpsim.errors import RequestError
from cdpsim.export.page.page_columns import page_columns
from cdpsim.files.notes import ticker
from cdpsim.numeric.columns import Columns
from cdpsim.trace import Trace

MOST_PAGE_BARS = 4_000_000  # a browser needs about 50 bytes for each
MOST_RUNS = 2
_HOLE = re.compile(r"\{\{(\w+)\}\}")
_COMPRESSION = 4  # of 9: beyond, it takes three times as long for a tenth less
SCRIPTS = ("run.js", "tracks.js", "draw.js", "find.js", "path.js", "range.js", "controls.js", "link.js")


def page(*traces: Trace) -> Iterator[bytes]:
    """Return an HTML file that shows a run, or two on one clock, some bytes at a time."""
    if len(traces) > MOST_RUNS:
        raise RequestError("page", f"has room for {MOST_RUNS} runs, not for {len(traces)}; give two")
    views = list(map(Views, traces))
    if len({each.in_slots for each in views}) > 1:
        problem = "one run is in slots, the other in seconds; give both a model or a cluster, or neither"
        raise RequestError("page", problem)
    bars = sum(each.run.program.nodes if each.run else len(each.start) for each in views)
    for many, what in ((bars, "tasks and messages"), (sum(each.devices for each in views), "devices")):
        if many > MOST_PAGE_BARS:
            problem = f"{many:,} {what} are more than the {MOST_PAGE_BARS:,} that it can hold; take fewer steps"
            raise RequestError("page", problem)
    return _page_parts(views)


def _page_parts(views: list[Views]) -> Iterator[bytes]:
    done = ticker(2, "write")
    columns, facts = page_columns(views)
    done(1)
    script, style = "\n".join(map(_read_part, SCRIPTS)), _read_part("page.css")
    title = " and ".join(plain_title(each.trace) for each in views)
    facts |= {"title": title, "columns": [[name, c.dtype.name, len(c)] for name, c in columns.items()]}
    parts = {
        "policy": f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'",
        "title": title.replace("&", "&amp;").replace("<", "&lt;"),
        "style": style,
        "script": script,
        # In JSON a < stands only within strings: escaped, nothing can end the element or begin a comment.
        "facts": msgspec.json.encode(facts).decode().replace("<", "\\u003c"),
    }
    for k, part in enumerate(_HOLE.split(_read_part("page.html"))):
        if k % 2 and part == "columns":
            yield from _squeezed(columns)
        else:
            yield (parts[part] if k % 2 else part).encode()
    done(0)


def _read_part(name: str) -> str:
    return files("cdpsim.export.page").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _squeezed(columns: Columns) -> Iterator[bytes]:
    """Return all columns as one zlib stream in base64; each begins at a multiple of eight bytes."""
    squeeze, waiting = zlib.compressobj(_COMPRESSION), b""
    for column in columns.values():
        waiting += squeeze.compress(column.tobytes() + bytes(-column.nbytes % 8))
        complete = len(waiting) // 3 * 3  # bytes that base64 needs no padding for
        yield b64encode(waiting[:complete])
        waiting = waiting[complete:]
    yield b64encode(waiting + squeeze.flush())
