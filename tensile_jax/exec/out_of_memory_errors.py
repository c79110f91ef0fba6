"""Tells whether an error of XLA means that the device had no memory for a launch."""


def is_out_of_memory(error: Exception, *, effectful: bool) -> bool:
    """Whether the device had no memory for a launch, so that nothing of it has run.

    If the launch is effectful, this must be XLA's own error: the error of a callback may quote it, but that callback has run.
    """
    story = str(error)
    return story.startswith("RESOURCE_EXHAUSTED") if effectful else "RESOURCE_EXHAUSTED" in story
