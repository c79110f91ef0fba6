"""Lists the units in which sizes of memory may be written, and formats sizes, counts and ratios of times for people."""

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


def times_plain_jit(step_us: float, jit_step_us: float) -> str:
    """What a step takes in the words in which every plan, report and table says it.

    >>> times_plain_jit(456.6, 362.4)
    "1.26 times plain jit's time"
    """
    return f"{step_us / jit_step_us:.2f} times plain jit's time"


def format_count(number: int, one: str, several: str = "") -> str:
    """A number of things, of which `one` is the name of one; of several, it has an `s` at its end, or is `several`.

    >>> format_count(1, "step"), format_count(3, "step"), format_count(0, "launch", "launches")
    ('1 step', '3 steps', '0 launches')
    """
    return f"{number} {one if number == 1 else several or one + 's'}"
