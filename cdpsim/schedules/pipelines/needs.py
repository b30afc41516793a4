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
