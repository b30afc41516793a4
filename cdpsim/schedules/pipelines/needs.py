"""What several orders need, and the refusals of what they cannot have."""

from cdpsim.errors import RequestError


def one_chunk(chunks: int) -> None:
    """Refuse more stages than devices."""
    if chunks != 1:
        raise RequestError("chunks", f"needs chunks = 1, a stage for each device; {chunks=}")


def even_devices(devices: int) -> None:
    """Refuse a device in the middle, which would have the same stage of both pipelines."""
    if devices % 2:
        raise RequestError("n", f"needs an even number of devices; {devices=}")


def two_chunks(chunks: int) -> None:
    """Refuse any other way to fold a pipeline than in a V."""
    if chunks != 2:
        raise RequestError("chunks", f"needs chunks = 2, two stages for each device; {chunks=}")


def even_micro_batches(m: int) -> None:
    """Refuse a micro-batch that would belong to neither half."""
    if m % 2:
        raise RequestError("m", f"needs an even number of micro-batches; {m=}")


def filled(devices: int, m: int) -> None:
    """Refuse fewer micro-batches than keep all devices busy in both directions."""
    if m < 2 * devices:
        raise RequestError("m", f"needs m >= 2 * devices; {m=}, {devices=}")


def equal_rounds(devices: int, m: int) -> int:
    """How many micro-batches go through a stage one after another, of those that come in rounds: about one a device."""
    rounds = max(1, m // devices)
    if m % rounds:
        raise RequestError("m", f"needs m to be a multiple of its m // devices = {rounds} rounds; {m=}, {devices=}")
    return m // rounds
