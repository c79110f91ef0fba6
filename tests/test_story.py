"""The story of a state machine: its last events, without what is large."""

from typing import Any, NamedTuple

from tensile_jax.exec.runtime.messages import Lost, Stepped
from tensile_jax.story import Story


class Happened(NamedTuple):
    number: int
    note: str
    thing: Any = None


def test_numbers_and_texts_are_told_and_objects_are_not_kept() -> None:
    story = Story().with_event(Happened(3, "well", object())).with_event(Stepped(object(), {"loss": 1.0}))
    story = story.with_event(Lost(RuntimeError("ill"), object(), 7))
    assert story.told == (("Happened", (3, "well")), ("Stepped", ()), ("Lost", (7,)))
    assert str(story) == "Happened(3, 'well'), Stepped(), Lost(7)"


def test_only_the_last_events_and_the_beginnings_of_texts_are_told() -> None:
    story = Story()
    for k in range(100):
        story = story.with_event(Happened(k, "x" * 1000))
    assert [values[0] for _, values in story.told] == list(range(68, 100))
    assert len(str(story)) < 32 * 120


def test_a_story_adds_itself_to_an_error() -> None:
    error, quiet = ValueError("wrong"), ValueError("wrong")
    Story().with_event(Happened(1, "a")).add_to(error)
    Story().add_to(quiet)
    assert error.__notes__ == ["The last events: Happened(1, 'a')"] and not hasattr(quiet, "__notes__")
