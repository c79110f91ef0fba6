"""Times and shares as people read them; sizes are `schedule.format_bytes`."""


def format_us(us: float) -> str:
    """Microseconds in the unit that suits them.

    >>> [format_us(us) for us in (0, 41.7, 4171.8, 3_251_600.0)]
    ['0 us', '41.7 us', '4.172 ms', '3.252 s']
    """
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.4g} {unit}"
    return f"{us:.4g} us"


def format_share(part: float, whole: float) -> str:
    """`part` in per cent of `whole`.

    >>> format_share(1, 3)
    '33.3%'
    """
    return f"{part / whole:.1%}"
