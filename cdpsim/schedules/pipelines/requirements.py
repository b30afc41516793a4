"""Refusals of numbers of devices, chunks and micro-batches for which orders are not defined."""

from cdpsim.errors import RequestError


def require_one_chunk(chunks: int) -> None:
    """Refuse several stages on a device."""
    if chunks != 1:
        raise RequestError("chunks", f"needs chunks = 1, a stage for each device; {chunks=}")


def require_even_devices(devices: int) -> None:
    """Refuse an odd number of devices: the middle one would have the same stage of both pipelines."""
    if devices % 2:
        raise RequestError("n", f"needs an even number of devices; {devices=}")


def require_two_chunks(chunks: int) -> None:
    """Refuse any other way to place a pipeline than in a V."""
    if chunks != 2:
        raise RequestError("chunks", f"needs chunks = 2, two stages for each device; {chunks=}")


def require_even_micro_batches(m: int) -> None:
    """Refuse an odd number of micro-batches, which has no halves."""
    if m % 2:
        raise RequestError("m", f"needs an even number of micro-batches; {m=}")


def require_full_pipeline(devices: int, m: int) -> None:
    """Refuse fewer micro-batches than keep all devices busy in both directions."""
    if m < 2 * devices:
        raise RequestError("m", f"needs m >= 2 * devices; {m=}, {devices=}")


def equal_rounds(devices: int, m: int) -> int:
    """Return the micro-batches of a round, about one for each device; refuse m that makes no equal rounds."""
    rounds = max(1, m // devices)
    if m % rounds:
        raise RequestError("m", f"needs m to be a multiple of its m // devices = {rounds} rounds; {m=}, {devices=}")
    return m // rounds
