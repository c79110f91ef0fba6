"""What a command says on stderr of its phases where there is no terminal."""

from io import StringIO

from rich.console import Console

from tensile_jax.cli.progress import Phases


def test_a_long_phase_says_now_and_then_about_how_long_it_will_take() -> None:
    screen, times = StringIO(), [0.0]
    with Phases(Console(file=screen, width=100), now_s=lambda: times[-1]) as phases:
        for now, done in ((0.0, 0), (3.0, 1), (9.0, 3), (12.0, 4), (20.0, 8), (25.0, 10)):
            times.append(now)
            phases.update("planning with every policy", done, 10)
    assert screen.getvalue().splitlines() == [
        "planning with every policy ...",
        "planning with every policy: 3/10, about 21 s more",
        "planning with every policy: 8/10, about 5 s more",
        "planning with every policy: 10/10",
    ]


def test_plans_whose_number_is_a_guess_give_no_estimate() -> None:
    screen, times = StringIO(), [0.0]
    with Phases(Console(file=screen, width=100), now_s=lambda: times[-1]) as phases:
        for now, done in ((0.0, 0), (30.0, 3)):
            times.append(now)
            phases.update("planning", done, 10)
    assert screen.getvalue() == "planning ...\n"
