"""Events in, orders out: small cases worked by hand. `test_all_interleavings.py` has all that can happen."""

from collections import Counter

import pytest

from tensile_jax.exec.controller.events import BatchReady, Budgeted, Died, Ended, Event, Moved, Prepared, Renewed, Waited, Wished
from tensile_jax.exec.controller.machine import smallest_need, step
from tensile_jax.exec.controller.orders import Admit, Adopt, Apply, Decline, Dismiss, Do, Order, Park, Rest, Unpark
from tensile_jax.exec.controller.state import JobId, State
from tests.exec.controller.world import demand, seat

A, B, C = JobId(0), JobId(1), JobId(2)
HILL = demand("ILI", 2, 3, 3, 6, 3, 3, 2)  # the state is 2 bytes, the peak 6
VALLEY = demand("ILWLI", 2, 3, 3, 8, 3, 3, 3, 8, 3, 3, 2)  # two peaks of 8, and 3 bytes while it waits for a copy between them
LOW = demand("ILI", 2, 2, 2, 5, 2, 2, 2)
CONSTANT = demand("ILI", 4, 4, 4, 6, 4, 4, 4, parked=3)  # 3 of its 4 bytes never leave


def say(state: State, *events: Event) -> tuple[State, list[Order]]:
    """What is said to these events, all in one."""
    said: list[Order] = []
    for event in events:
        state, more = step(state, event)
        said += more
    return state, said


def here(budget: int, *demands: object, depth: int = 1, steps: int = 2, **options: float) -> State:
    """Jobs that are admitted, each with a batch, the first of them brought to the device, and begun."""
    events = [Prepared(seat(k, d, steps=steps, **options)) for k, d in enumerate(demands)]  # pyright: ignore[reportArgumentType]
    batches = [BatchReady(JobId(k)) for k in range(len(demands))]
    return say(State(budget, 100, depth=depth), *events, *batches, Moved(A))[0]


def test_a_lonely_job_is_admitted_brought_run_and_dismissed_with_its_state_on_the_host() -> None:
    state = State(6, 100)
    told: list[list[Order]] = []
    for event in (Prepared(seat(0, HILL, steps=1)), BatchReady(A), Moved(A), Ended(A, 5.0), Moved(A)):
        state, said = step(state, event)
        told.append(said)
    assert told == [[Admit(A)], [Unpark(A)], [Do(A, 0), Do(A, 1)], [Do(A, 2), Park(A)], [Dismiss(A)]]
    assert state == State(6, 100)


def test_two_launches_are_in_flight_where_the_depth_is_two() -> None:
    state, said = say(State(6, 100, depth=2), Prepared(seat(0, HILL)), BatchReady(A), BatchReady(A), Moved(A))
    twice = [Do(A, 0), Do(A, 1), Do(A, 2)] * 2
    assert said == [Admit(A), Unpark(A), *twice, Park(A)]
    assert state.in_flight == ((A, 3), (A, 3))
    assert state.held_bytes == 2 + 3  # the state, and what one of them needs besides: they run one after the other
    assert say(state, Moved(A), Ended(A, 1.0), Ended(A, 1.0)) == (State(6, 100, depth=2), [Dismiss(A)])


def test_a_valley_is_filled_by_another_job() -> None:
    state = here(10, VALLEY, LOW, steps=1)
    state, said = say(state, Moved(B))
    assert said == []  # 8 + 5 bytes are too many
    state, said = say(state, Ended(A, 1.0))
    assert said == [Do(A, 2), Do(B, 0), Do(B, 1)]  # while the first waits for its copy
    state, said = say(state, Waited(A))
    assert said == []
    state, said = say(state, Ended(B, 1.0))
    assert said == [Do(A, 3), Do(B, 2), Park(B)]


def test_memory_that_is_given_back_goes_first_to_the_job_whose_turn_is_earlier() -> None:
    waiting, freeing = demand("LL", 2, 3, 3, 9, 2), demand("IWIL", 2, 5, 5, 5, 5, 5, 1, 3, 2)
    batches = (BatchReady(A), BatchReady(B))
    state, said = say(
        State(11, 100, depth=2), Prepared(seat(0, waiting)), Prepared(seat(1, freeing)), *batches, Moved(B), Moved(A)
    )
    assert said == [Admit(A), Admit(B), Unpark(A), Unpark(B), Do(B, 0), Do(B, 1), Do(A, 0)]  # 9 + 5 bytes are too many
    assert say(state, Waited(B))[1] == [Do(B, 2), Do(A, 1)]


def test_an_iteration_does_not_begin_where_two_could_not_both_be_finished() -> None:
    rising = demand("LLL", 0, 4, 4, 4, 4, 8, 0)
    state, said = say(here(8, rising, rising, depth=2), Moved(B))
    assert said == []
    assert say(state, Ended(A, 1.0))[1] == [Do(A, 2)]


def test_the_job_whose_turn_it_is_has_another_parked() -> None:
    state = here(7, HILL, HILL)
    state, said = say(state, BatchReady(A), Ended(A, 1.0))
    assert said == [Do(A, 2), Park(A)]  # 2 + 6 bytes are too many; the other has waited longer
    state, said = say(state, Moved(A))
    assert said == [Unpark(B)]
    assert say(state, Moved(B))[1] == [Do(B, 0), Do(B, 1)]


def test_a_job_stays_while_bringing_the_other_back_is_not_worth_the_copies() -> None:
    slow = demand("ILI", 2, 3, 3, 6, 3, 3, 2, switch_us=1.0)  # worth 20 microseconds
    state = here(7, slow, slow, steps=9)
    state, said = say(state, BatchReady(A), Ended(A, 15.0))
    assert said == [Do(A, 2), Do(A, 0), Do(A, 1)]
    state, said = say(state, BatchReady(A), Ended(A, 15.0))
    assert said == [Do(A, 2), Park(A)]


def test_a_paused_job_ends_its_iteration_and_rests_on_the_host() -> None:
    state, said = say(here(6, HILL), Wished(A, "pause"))
    assert said == []
    state, said = say(state, Ended(A, 1.0), Moved(A), BatchReady(A))
    assert said == [Do(A, 2), Park(A), Rest(A)]
    state, said = say(state, Wished(A, "run"), Moved(A))
    assert said == [Unpark(A), Do(A, 0), Do(A, 1)]


def test_a_cancelled_job_ends_its_iteration_first_and_there_is_no_way_back() -> None:
    state, said = say(here(6, HILL), Wished(A, "stop"), Wished(A, "run"), Ended(A, 1.0), Moved(A))
    assert said == [Do(A, 2), Park(A), Dismiss(A)]
    assert state == State(6, 100)


def test_a_queued_job_rests_and_is_dismissed_where_it_is() -> None:
    state, said = say(State(6, 100), Prepared(seat(0, HILL)), Prepared(seat(1, CONSTANT)), BatchReady(B))
    assert said == [Admit(A)]  # 3 + 6 bytes are too many: the second waits
    assert say(state, Wished(B, "pause"))[1] == [Rest(B)]
    assert say(state, Wished(B, "stop"), Died(B), BatchReady(B))[1] == [Dismiss(B)]
    assert say(state, Wished(A, "stop"))[1] == [Dismiss(A), Admit(B), Unpark(B)]


def test_what_a_dead_job_held_is_free_and_what_comes_late_is_not_heard() -> None:
    state = here(7, HILL, HILL)
    state, said = say(state, Died(A))
    assert said == [Unpark(B)]
    before = state
    state, said = say(state, Ended(A, 1.0), Waited(A), Moved(A), BatchReady(A), Wished(A, "pause"), Renewed(A, HILL), Died(A))
    assert (state, said) == (before, [])
    assert say(state, Moved(B))[1] == [Do(B, 0), Do(B, 1)]


def test_a_renewed_plan_is_adopted_once_the_state_has_been_away() -> None:
    state, said = say(here(6, HILL), BatchReady(A), Renewed(A, LOW), Ended(A, 1.0), Moved(A), Moved(A))
    assert said == [Do(A, 2), Park(A), Adopt(A), Unpark(A), Do(A, 0), Do(A, 1)]
    assert state.seats[0].demand is LOW


def test_a_renewed_plan_that_could_not_run_or_would_shut_another_out_is_declined() -> None:
    state, said = say(here(6, HILL), BatchReady(A), Renewed(A, VALLEY), Ended(A, 1.0), Moved(A))
    assert said == [Do(A, 2), Park(A), Decline(A), Unpark(A)]  # 8 of 6 bytes
    events = (Prepared(seat(0, LOW)), Prepared(seat(1, HILL)), Renewed(B, CONSTANT), Renewed(A, CONSTANT))
    state, said = say(State(8, 100), *events)
    assert said == [Admit(A), Admit(B), Adopt(B), Decline(A)]  # 3 bytes stay: 3 + 5 are possible, 3 + 6 are not


def test_a_renewed_plan_waits_for_room_for_its_constants() -> None:
    half = demand("ILI", 4, 4, 4, 5, 4, 4, 4)
    state = say(here(9, half, half), Moved(B), Ended(A, 1.0), Ended(B, 1.0), Prepared(seat(2, LOW)))[0]
    assert state.held_bytes == 8
    state, said = say(state, Renewed(C, CONSTANT), BatchReady(A))
    assert said == [Park(B)]
    assert say(state, Moved(B))[1] == [Adopt(C), Do(A, 0), Do(A, 1)]


def test_a_queued_job_takes_a_renewed_plan_at_once() -> None:
    state, said = say(State(5, 100), Prepared(seat(0, HILL)), Renewed(A, LOW))
    assert said == [Admit(A)]
    assert state.seats[0].demand is LOW


def test_a_higher_budget_holds_at_once_and_a_lower_one_when_iterations_are_over() -> None:
    state = here(8, HILL, LOW)
    assert say(state, Budgeted(20))[1] == [Apply(20)]
    state, said = say(state, BatchReady(A), Moved(B), Budgeted(6))
    assert said == []
    state, said = say(state, Ended(A, 1.0))
    assert said == [Do(A, 2), Apply(6), Park(A)]  # and the second needs all of them
    assert state.budget_bytes == 6


def test_a_lower_budget_parks_whom_it_must_and_is_refused_where_that_is_not_enough() -> None:
    state, said = say(here(9, CONSTANT, HILL, steps=1), Moved(B), Budgeted(2), Ended(A, 1.0))
    assert said == [Do(A, 2), Park(A)]
    state, said = say(state, Moved(A))
    assert said == [Dismiss(A), Apply(2)]
    state, said = say(here(9, CONSTANT), Budgeted(2), Ended(A, 1.0), Moved(A))
    assert said == [Do(A, 2), Park(A), Apply(9)]


def test_a_job_that_no_longer_fits_waits_and_makes_room_for_others() -> None:
    state = say(here(9, VALLEY, steps=9), Prepared(seat(1, LOW)), BatchReady(A), Budgeted(6), Ended(A, 1.0), Waited(A))[0]
    state, said = say(state, Ended(A, 1.0))
    assert said == [Do(A, 4), Apply(6)]
    state, said = say(state, BatchReady(B), Moved(A), Moved(B))
    assert said == [Park(A), Unpark(B), Do(B, 0), Do(B, 1)]
    state, said = say(state, Ended(B, 1.0), Budgeted(8), Moved(B), Moved(A))
    assert said == [Do(B, 2), Apply(8), Park(B), Unpark(A), Do(A, 0), Do(A, 1)]


def test_a_job_that_no_longer_fits_is_parked_before_those_that_do() -> None:
    state = say(here(20, VALLEY, LOW, steps=9), Moved(B), BatchReady(A), Ended(A, 1.0), Waited(A), Ended(B, 1.0), Budgeted(7))[0]
    state, said = say(state, Ended(A, 1.0), BatchReady(B))
    assert said == [Do(A, 4), Apply(7), Do(B, 0), Do(B, 1)]
    state, said = say(state, Prepared(seat(2, LOW)), BatchReady(C))
    assert said == [Admit(C), Park(A)]  # 2 + 2 + 5 bytes are too many, 2 + 5 are not; and the first needs 8


def test_a_host_that_is_full_keeps_a_job_in_the_queue() -> None:
    state, said = say(State(9, 3), Prepared(seat(0, HILL, steps=1)), Prepared(seat(1, HILL, steps=1)))
    assert said == [Admit(A)]
    assert smallest_need(state, HILL) == (6, 4)
    assert say(state, Wished(A, "stop"))[1] == [Dismiss(A), Admit(B)]


def test_nobody_goes_by_who_waits_in_the_queue_unless_that_one_waits_for_a_paused_job() -> None:
    events = (Prepared(seat(0, CONSTANT)), Prepared(seat(1, VALLEY)), Prepared(seat(2, LOW)))
    state, said = say(State(10, 100), *events)
    assert said == [Admit(A)]  # 3 + 8 bytes are too many, and the third, which would fit, is behind
    assert say(state, Wished(A, "pause"))[1] == [Rest(A), Admit(C)]
    assert say(state, Wished(A, "stop"))[1] == [Dismiss(A), Admit(B), Admit(C)]


def test_the_heaviest_job_leaves_the_queue_first() -> None:
    first, second = Prepared(seat(1, VALLEY)), Prepared(seat(2, VALLEY, weight=2.0))
    state = say(State(8, 2), Prepared(seat(0, LOW)), first, second)[0]
    assert say(state, Wished(A, "stop"))[1] == [Dismiss(A), Admit(C)]


def test_constants_do_not_come_while_a_launch_needs_the_room() -> None:
    tall = demand("ILI", 0, 0, 0, 7, 0, 0, 0)
    state, said = say(here(9, tall, steps=9), Prepared(seat(1, CONSTANT)))
    assert said == []  # 7 bytes for the launch in flight, which will hold nothing when it is over; and 3 to stay
    assert Admit(B) not in say(state, BatchReady(A))[1]
    small = demand("ILI", 0, 0, 0, 6, 0, 0, 0)
    state, said = say(here(9, small, demand("ILI", 2, 2, 2, 2, 2, 2, 2), steps=9), Moved(B), Prepared(seat(2, CONSTANT)))
    assert said == []
    assert say(state, Ended(A, 1.0))[1][:2] == [Admit(C), Do(A, 2)]


def test_jobs_between_iterations_make_room_for_a_new_jobs_constants() -> None:
    half = demand("ILI", 4, 4, 4, 5, 4, 4, 4)
    state = say(here(9, half, half), Moved(B), Ended(A, 1.0), Ended(B, 1.0))[0]
    assert state.held_bytes == 8
    state, said = say(state, Prepared(seat(2, demand("ILI", 3, 3, 3, 4, 3, 3, 3, parked=3))))
    assert said == [Park(B)]
    state, said = say(state, BatchReady(A))
    assert said == []  # nothing begins before
    assert say(state, Moved(B))[1] == [Admit(C), Do(A, 0), Do(A, 1)]


def test_a_job_that_was_paused_for_long_begins_again_where_the_others_are() -> None:
    state = here(20, HILL, HILL, steps=100)
    state = say(state, Moved(B), Wished(B, "pause"), Moved(B))[0]
    for _ in range(50):
        state = say(state, BatchReady(A), Ended(A, 10.0))[0]
    state = say(state, Wished(B, "run"), *[BatchReady(B)] * 9, *[BatchReady(A)] * 9, Moved(B))[0]
    turns: list[int] = []
    for _ in range(8):
        running = state.in_flight[0][0]
        turns.append(running)
        state = say(state, Ended(running, 10.0))[0]
    assert turns == [A, B, A, B, A, B, A, B]


def test_compute_time_is_shared_by_weight() -> None:
    weights = (1.0, 2.0, 4.0)
    state = State(100, 1000)
    for k, weight in enumerate(weights):
        state = say(state, Prepared(seat(k, HILL, steps=1000, weight=weight)), *[BatchReady(JobId(k))] * 1000)[0]
    state = say(state, *[Moved(JobId(k)) for k in range(3)])[0]
    launches: Counter[int] = Counter()
    for _ in range(700):
        job = state.in_flight[0][0]
        launches[job] += 1
        state = say(state, Ended(job, 3.0))[0]
    assert launches == {A: 100, B: 200, C: 400}


def test_a_jobs_number_is_never_used_again() -> None:
    state = here(6, HILL)
    with pytest.raises(ValueError, match="never be used again: got a second job 0"):
        step(state, Prepared(seat(0, LOW)))
