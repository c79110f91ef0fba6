"""The metrics of the paper (section V-A), rounded, of anything that has a peak and a time relative to plain jit's."""


def metrics(msr: float, eor: float) -> dict[str, float]:
    """The memory saving rate, the extra overhead rate, and the cost-benefit rate, which follows from the two."""
    return {"msr": round(msr, 4), "eor": round(eor, 4), "cbr": round(msr / eor, 4)}
