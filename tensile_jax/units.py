"""Lists the units in which sizes of memory may be written, and formats sizes for people."""

SIZES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
"""The units of sizes that may be typed, in lower case, and their bytes."""


def format_bytes(nbytes: float) -> str:
    """Bytes in binary units, with up to four digits.

    >>> [format_bytes(nbytes) for nbytes in (0, 1536, 1.25 * 2**30)]
    ['0 B', '1.5 KiB', '1.25 GiB']
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{int(nbytes)} B"
