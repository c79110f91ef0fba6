"""What is said of a call that takes long, and about how long it will still take."""

from tensile_jax.progress.phases import BATCHES, POLICIES, CallPhases, phase_title, phase_words

BEGUN = CallPhases("train_step", 100.0, since_s=100.0, told_s=100.0)


def test_a_call_of_which_nothing_was_told_is_starting() -> None:
    assert BEGUN.text(103.0) == "train_step: starting, 3 s so far"


def test_each_phase_is_said_in_words_with_the_part_that_is_under_way() -> None:
    assert phase_words("compiling plain jit", 0, 1) == "compiling plain jit's step, to know its peak"
    assert phase_words("planning", 0, 1) == "planning"
    assert phase_words("planning", 1, 4) == "planning 2 of about 4"
    assert phase_words("compiling programs", 3, 3) == "compiling 3 of 3 programs"
    assert phase_words("calibrating H200", 2, 8) == "calibrating H200 3 of 8"


def test_the_title_of_a_phase_does_not_say_how_far_it_is() -> None:
    assert phase_title("compiling segments", 12) == "compiling 12 segments"
    assert phase_title("compiling plain jit", 1) == "compiling plain jit's step, to know its peak"
    assert phase_title("planning", 4) == "planning"


def test_what_the_executables_took_so_far_says_how_long_the_others_will_take() -> None:
    call = BEGUN.told("compiling segments", 0, 12, 110.0)
    assert call.left_s(115.0) is None
    call = call.told("compiling segments", 4, 12, 118.0)
    assert call.left_s(118.0) == 16.0
    assert call.left_s(128.0) == 6.0
    assert call.left_s(200.0) == 0.0
    assert call.text(119.0) == "train_step: compiling 5 of 12 segments, 19 s so far, about 15 s more"


def test_what_plain_jit_took_to_compile_says_how_long_the_call_will_take() -> None:
    call = BEGUN.told("compiling plain jit", 0, 1, 101.0).told("compiling plain jit", 0, 1, 105.0)
    call = call.told("compiling plain jit", 1, 1, 111.0).told("planning", 0, 3, 111.0)
    assert call.plain_jit_s == 10.0
    assert call.left_s(115.0) == 19.0
    assert call.text(115.0) == "train_step: planning 1 of about 3, 15 s so far, about 19 s more"
    assert call.text(400.0) == "train_step: planning 1 of about 3, 5 min so far"


def test_a_phase_that_comes_again_begins_anew() -> None:
    call = BEGUN.told("compiling segments", 0, 4, 110.0).told("compiling segments", 4, 4, 114.0)
    call = call.told("compiling segments", 0, 2, 120.0)
    assert (call.since_s, call.share, call.left_s(121.0)) == (120.0, 0.0, None)
    assert call.told("compiling segments", 1, 2, 123.0).left_s(123.0) == 3.0


def test_every_phase_of_several_parts_says_how_long_it_will_take_but_for_plans_whose_number_is_a_guess() -> None:
    call = BEGUN.told(POLICIES, 0, 20, 110.0).told(POLICIES, 5, 20, 120.0)
    assert call.text(120.0) == "train_step: planning with every policy 6 of 20, 20 s so far, about 30 s more"
    assert BEGUN.told("planning", 0, 4, 110.0).told("planning", 2, 4, 120.0).left_s(120.0) is None


def test_a_phase_goes_on_when_it_turns_out_to_have_more_parts() -> None:
    call = BEGUN.told(BATCHES, 1, 100, 110.0).told(BATCHES, 51, 151, 160.0)
    assert (call.since_s, call.more_text(160.0)) == (110.0, "about 98 s more")
    assert call.text(160.0) == "train_step: planning batches, in samples 52 of about 151, 60 s so far, about 98 s more"
    assert call.told(BATCHES, 151, 151, 200.0).more_text(200.0) == ""
