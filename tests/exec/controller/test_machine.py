"""Events in, instructions out: small cases worked by hand. `test_all_interleavings.py` has all that can happen."""

from collections import Counter

import pytest

from tensile_jax.exec.controller.machine import step
from tensile_jax.exec.controller.messages import (
    Admit,
    AdoptPlan,
    ApplyBudget,
    BatchLoaded,
    BudgetRequested,
    DeclinePlan,
    Event,
    Instruction,
    Issue,
    JobLost,
    Park,
    PlanRenewed,
    Prepared,
    Release,
    ReportPaused,
    RunEnded,
    StateMoved,
    Unpark,
    WaitEnded,
    Wished,
)
from tensile_jax.exec.controller.state import JobId, State
from tensile_jax.plan.multi_job.admission import smallest_budgets
from tests.exec.controller.world import memory, offer, record

A, B, C = JobId(0), JobId(1), JobId(2)
HILL = memory("ILI", 2, 3, 3, 6, 3, 3, 2)  # the state is 2 bytes, the peak 6
VALLEY = memory("ILWLI", 2, 3, 3, 8, 3, 3, 3, 8, 3, 3, 2)  # two peaks of 8, and 3 bytes while it waits for a copy between them
LOW = memory("ILI", 2, 2, 2, 5, 2, 2, 2)
CONSTANT = memory("ILI", 4, 4, 4, 6, 4, 4, 4, parked=3)  # 3 of its 4 bytes never leave


def say(state: State, *events: Event) -> tuple[State, list[Instruction]]:
    """The instructions that answer these events, all in one list."""
    instructions: list[Instruction] = []
    for event in events:
        state, more = step(state, event)
        instructions += more
    return state, instructions


def here(budget: int, *memories: object, depth: int = 1, steps: int = 2, **options: float) -> State:
    """Jobs that are admitted, each with a batch, the first of them brought to the device, and begun."""
    events = [Prepared(record(k, d, steps=steps, **options)) for k, d in enumerate(memories)]  # pyright: ignore[reportArgumentType]
    batches = [BatchLoaded(JobId(k)) for k in range(len(memories))]
    return say(State(budget, 100, depth=depth), *events, *batches, StateMoved(A))[0]


def test_a_lonely_job_is_admitted_unparked_run_and_released_with_its_state_on_the_host() -> None:
    state = State(6, 100)
    told: list[list[Instruction]] = []
    for event in (Prepared(record(0, HILL, steps=1)), BatchLoaded(A), StateMoved(A), RunEnded(A, 5.0), StateMoved(A)):
        state, instructions = step(state, event)
        told.append(instructions)
    assert told == [[Admit(A)], [Unpark(A)], [Issue(A, 0, 1), Issue(A, 1, 2)], [Issue(A, 2, 3), Park(A)], [Release(A)]]
    assert state == State(6, 100)


def test_two_launches_are_in_flight_where_the_depth_is_two() -> None:
    state, instructions = say(State(6, 100, depth=2), Prepared(record(0, HILL)), BatchLoaded(A), BatchLoaded(A), StateMoved(A))
    twice = [Issue(A, 0, 1), Issue(A, 1, 2), Issue(A, 2, 3)] * 2
    assert instructions == [Admit(A), Unpark(A), *twice, Park(A)]
    assert state.in_flight == ((A, 3), (A, 3))
    assert state.held_bytes == 2 + 3  # the state, and what one of them needs besides: they run one after the other
    assert say(state, StateMoved(A), RunEnded(A, 1.0), RunEnded(A, 1.0)) == (State(6, 100, depth=2), [Release(A)])


def test_a_valley_is_filled_by_another_job() -> None:
    state = here(10, VALLEY, LOW, steps=1)
    state, instructions = say(state, StateMoved(B))
    assert instructions == []  # 8 + 5 bytes are too many
    state, instructions = say(state, RunEnded(A, 1.0))
    assert instructions == [Issue(A, 2, 3), Issue(B, 0, 1), Issue(B, 1, 2)]  # while the first waits for its copy
    state, instructions = say(state, WaitEnded(A))
    assert instructions == []
    state, instructions = say(state, RunEnded(B, 1.0))
    assert instructions == [Issue(A, 3, 4), Issue(B, 2, 3), Park(B)]


def test_memory_that_is_given_back_goes_first_to_the_job_whose_turn_is_earlier() -> None:
    waiting, freeing = memory("LL", 2, 3, 3, 9, 2), memory("IWIL", 2, 5, 5, 5, 5, 5, 1, 3, 2)
    batches = (BatchLoaded(A), BatchLoaded(B))
    state, instructions = say(
        State(11, 100, depth=2),
        Prepared(record(0, waiting)),
        Prepared(record(1, freeing)),
        *batches,
        StateMoved(B),
        StateMoved(A),
    )
    assert instructions == [
        Admit(A),
        Admit(B),
        Unpark(A),
        Unpark(B),
        Issue(B, 0, 1),
        Issue(B, 1, 2),
        Issue(A, 0, 1),
    ]  # 9 + 5 bytes are too many
    assert say(state, WaitEnded(B))[1] == [Issue(B, 2, 3), Issue(A, 1, 2)]


def test_an_iteration_does_not_begin_where_two_could_not_both_be_finished() -> None:
    rising = memory("LLL", 0, 4, 4, 4, 4, 8, 0)
    state, instructions = say(here(8, rising, rising, depth=2), StateMoved(B))
    assert instructions == []
    assert say(state, RunEnded(A, 1.0))[1] == [Issue(A, 2, 3)]


def test_the_job_whose_turn_it_is_has_another_parked() -> None:
    state = here(7, HILL, HILL)
    state, instructions = say(state, BatchLoaded(A), RunEnded(A, 1.0))
    assert instructions == [Issue(A, 2, 3), Park(A)]  # 2 + 6 bytes are too many; the other has waited longer
    state, instructions = say(state, StateMoved(A))
    assert instructions == [Unpark(B)]
    assert say(state, StateMoved(B))[1] == [Issue(B, 0, 1), Issue(B, 1, 2)]


def test_a_job_stays_while_bringing_the_other_back_is_not_worth_the_copies() -> None:
    slow = memory("ILI", 2, 3, 3, 6, 3, 3, 2, switch_us=1.0)  # worth 20 microseconds
    state = here(7, slow, slow, steps=9)
    state, instructions = say(state, BatchLoaded(A), RunEnded(A, 15.0))
    assert instructions == [Issue(A, 2, 3), Issue(A, 0, 1), Issue(A, 1, 2)]
    state, instructions = say(state, BatchLoaded(A), RunEnded(A, 15.0))
    assert instructions == [Issue(A, 2, 3), Park(A)]


def test_a_paused_job_ends_its_iteration_and_is_reported_on_the_host() -> None:
    state, instructions = say(here(6, HILL), Wished(A, "pause"))
    assert instructions == []
    state, instructions = say(state, RunEnded(A, 1.0), StateMoved(A), BatchLoaded(A))
    assert instructions == [Issue(A, 2, 3), Park(A), ReportPaused(A)]
    state, instructions = say(state, Wished(A, "run"), StateMoved(A))
    assert instructions == [Unpark(A), Issue(A, 0, 1), Issue(A, 1, 2)]


def test_a_cancelled_job_ends_its_iteration_first_and_there_is_no_way_back() -> None:
    state, instructions = say(here(6, HILL), Wished(A, "stop"), Wished(A, "run"), RunEnded(A, 1.0), StateMoved(A))
    assert instructions == [Issue(A, 2, 3), Park(A), Release(A)]
    assert state == State(6, 100)


def test_a_pending_job_is_paused_and_released_where_it_is() -> None:
    state, instructions = say(State(6, 100), Prepared(record(0, HILL)), Prepared(record(1, CONSTANT)), BatchLoaded(B))
    assert instructions == [Admit(A)]  # 3 + 6 bytes are too many: the second waits
    assert say(state, Wished(B, "pause"))[1] == [ReportPaused(B)]
    assert say(state, Wished(B, "stop"), JobLost(B), BatchLoaded(B))[1] == [Release(B)]
    assert say(state, Wished(A, "stop"))[1] == [Release(A), Admit(B), Unpark(B)]


def test_what_a_lost_job_held_is_free_and_late_events_are_dropped() -> None:
    state = here(7, HILL, HILL)
    state, instructions = say(state, JobLost(A))
    assert instructions == [Unpark(B)]
    before = state
    state, instructions = say(
        state,
        RunEnded(A, 1.0),
        WaitEnded(A),
        StateMoved(A),
        BatchLoaded(A),
        Wished(A, "pause"),
        PlanRenewed(A, offer(HILL)),
        JobLost(A),
    )
    assert (state, instructions) == (before, [])
    assert say(state, StateMoved(B))[1] == [Issue(B, 0, 1), Issue(B, 1, 2)]


def test_a_job_pauses_for_a_checkpoint_even_if_it_is_told_to_run_and_runs_when_it_is_told_again() -> None:
    state = say(State(6, 100), Prepared(record(0, HILL, checkpoint_every=1)), BatchLoaded(A), BatchLoaded(A), StateMoved(A))[0]
    state, instructions = say(state, Wished(A, "run"), RunEnded(A, 1.0), Wished(A, "run"), StateMoved(A))
    assert instructions == [Issue(A, 2, 3), Park(A), ReportPaused(A)]
    assert say(state, Wished(A, "run"))[1] == [Unpark(A)]


def test_a_renewed_plan_is_adopted_once_the_state_has_been_away() -> None:
    state, instructions = say(
        here(6, HILL), BatchLoaded(A), PlanRenewed(A, offer(LOW)), RunEnded(A, 1.0), StateMoved(A), StateMoved(A)
    )
    assert instructions == [Issue(A, 2, 3), Park(A), AdoptPlan(A, offer(LOW)), Unpark(A), Issue(A, 0, 1), Issue(A, 1, 2)]
    assert (state.records[0].memory, state.records[0].plan) == (LOW, 1)


def test_a_renewed_plan_that_could_not_run_or_would_shut_another_out_is_declined() -> None:
    state, instructions = say(here(6, HILL), BatchLoaded(A), PlanRenewed(A, offer(VALLEY)), RunEnded(A, 1.0), StateMoved(A))
    assert instructions == [Issue(A, 2, 3), Park(A), DeclinePlan(A, offer(VALLEY)), Unpark(A)]  # 8 of 6 bytes
    state = say(State(8, 100), Prepared(record(0, LOW)), Prepared(record(1, HILL)))[0]
    plan = offer(CONSTANT)  # 3 bytes stay: 3 + 5 are possible, 3 + 6 are not
    assert say(state, PlanRenewed(B, plan), PlanRenewed(A, plan))[1] == [AdoptPlan(B, plan), DeclinePlan(A, plan)]


def test_a_renewed_plan_waits_for_room_for_its_constants() -> None:
    half = memory("ILI", 4, 4, 4, 5, 4, 4, 4)
    state = say(here(9, half, half), StateMoved(B), RunEnded(A, 1.0), RunEnded(B, 1.0), Prepared(record(2, LOW)))[0]
    assert state.held_bytes == 8
    state, instructions = say(state, PlanRenewed(C, offer(CONSTANT)), BatchLoaded(A))
    assert instructions == [Park(B)]
    assert say(state, StateMoved(B))[1] == [AdoptPlan(C, offer(CONSTANT)), Issue(A, 0, 1), Issue(A, 1, 2)]


def test_a_pending_job_takes_a_renewed_plan_at_once() -> None:
    state, instructions = say(State(5, 100), Prepared(record(0, HILL)), PlanRenewed(A, offer(LOW)))
    assert instructions == [Admit(A)]
    assert (state.records[0].memory, state.records[0].plan) == (LOW, 1)


def test_an_error_quotes_the_last_events() -> None:
    state = say(State(6, 100), Prepared(record(0, HILL)), BatchLoaded(A), Wished(A, "pause"))[0]
    with pytest.raises(ValueError, match="used again") as raised:
        step(state, Prepared(record(0, LOW)))
    assert raised.value.__notes__ == ["The last events: Prepared(), BatchLoaded(0), Wished(0, 'pause'), Prepared()"]


def test_a_higher_budget_holds_at_once_and_a_lower_one_when_iterations_are_over() -> None:
    state = here(8, HILL, LOW)
    assert say(state, BudgetRequested(20))[1] == [ApplyBudget(20)]
    state, instructions = say(state, BatchLoaded(A), StateMoved(B), BudgetRequested(6))
    assert instructions == []
    state, instructions = say(state, RunEnded(A, 1.0))
    assert instructions == [Issue(A, 2, 3), ApplyBudget(6), Park(A)]  # and the second needs all of them
    assert state.budget_bytes == 6


def test_a_lower_budget_parks_the_jobs_it_must_and_is_refused_where_that_is_not_enough() -> None:
    state, instructions = say(here(9, CONSTANT, HILL, steps=1), StateMoved(B), BudgetRequested(2), RunEnded(A, 1.0))
    assert instructions == [Issue(A, 2, 3), Park(A)]
    state, instructions = say(state, StateMoved(A))
    assert instructions == [Release(A), ApplyBudget(2)]
    state, instructions = say(here(9, CONSTANT), BudgetRequested(2), RunEnded(A, 1.0), StateMoved(A))
    assert instructions == [Issue(A, 2, 3), Park(A), ApplyBudget(9)]


def test_a_job_that_no_longer_fits_waits_and_makes_room_for_others() -> None:
    state = say(here(9, VALLEY, steps=9), Prepared(record(1, LOW)), BatchLoaded(A), BudgetRequested(6))[0]
    state, instructions = say(state, RunEnded(A, 1.0))
    assert instructions == [Issue(A, 4, 5), ApplyBudget(6)]
    state, instructions = say(state, BatchLoaded(B), StateMoved(A), StateMoved(B))
    assert instructions == [Park(A), Unpark(B), Issue(B, 0, 1), Issue(B, 1, 2)]
    state, instructions = say(state, RunEnded(B, 1.0), BudgetRequested(8), StateMoved(B), StateMoved(A))
    assert instructions == [Issue(B, 2, 3), ApplyBudget(8), Park(B), Unpark(A), Issue(A, 0, 1), Issue(A, 1, 2)]


def test_a_job_that_no_longer_fits_is_parked_before_those_that_do() -> None:
    state = say(
        here(20, VALLEY, LOW, steps=9),
        StateMoved(B),
        BatchLoaded(A),
        RunEnded(A, 1.0),
        WaitEnded(A),
        RunEnded(B, 1.0),
        BudgetRequested(7),
    )[0]
    state, instructions = say(state, RunEnded(A, 1.0), BatchLoaded(B))
    assert instructions == [Issue(A, 4, 5), ApplyBudget(7), Issue(B, 0, 1), Issue(B, 1, 2)]
    state, instructions = say(state, Prepared(record(2, LOW)), BatchLoaded(C))
    assert instructions == [Admit(C), Park(A)]  # 2 + 2 + 5 bytes are too many, 2 + 5 are not; and the first needs 8


def test_a_host_that_is_full_keeps_a_job_pending() -> None:
    state, instructions = say(State(9, 3), Prepared(record(0, HILL, steps=1)), Prepared(record(1, HILL, steps=1)))
    assert instructions == [Admit(A)]
    assert smallest_budgets([HILL, *(one.memory for one in state.records)]) == (6, 4)
    assert say(state, Wished(A, "stop"))[1] == [Release(A), Admit(B)]


def test_no_job_is_admitted_before_a_pending_one_unless_that_one_waits_for_a_paused_job() -> None:
    events = (Prepared(record(0, CONSTANT)), Prepared(record(1, VALLEY)), Prepared(record(2, LOW)))
    state, instructions = say(State(10, 100), *events)
    assert instructions == [Admit(A)]  # 3 + 8 bytes are too many, and the third, which would fit, is behind
    assert say(state, Wished(A, "pause"))[1] == [ReportPaused(A), Admit(C)]
    assert say(state, Wished(A, "stop"))[1] == [Release(A), Admit(B), Admit(C)]


def test_the_pending_job_of_the_greatest_weight_is_admitted_first() -> None:
    first, second = Prepared(record(1, VALLEY)), Prepared(record(2, VALLEY, weight=2.0))
    state = say(State(8, 2), Prepared(record(0, LOW)), first, second)[0]
    assert say(state, Wished(A, "stop"))[1] == [Release(A), Admit(C)]


def test_constants_do_not_come_while_a_launch_needs_the_room() -> None:
    tall = memory("ILI", 0, 0, 0, 7, 0, 0, 0)
    state, instructions = say(here(9, tall, steps=9), Prepared(record(1, CONSTANT)))
    assert instructions == []  # 7 bytes for the launch in flight, which will hold nothing when it is over; and 3 to stay
    assert Admit(B) not in say(state, BatchLoaded(A))[1]
    small = memory("ILI", 0, 0, 0, 6, 0, 0, 0)
    state, instructions = say(
        here(9, small, memory("ILI", 2, 2, 2, 2, 2, 2, 2), steps=9), StateMoved(B), Prepared(record(2, CONSTANT))
    )
    assert instructions == []
    assert say(state, RunEnded(A, 1.0))[1][:2] == [Admit(C), Issue(A, 2, 3)]


def test_jobs_between_iterations_make_room_for_a_new_jobs_constants() -> None:
    half = memory("ILI", 4, 4, 4, 5, 4, 4, 4)
    state = say(here(9, half, half), StateMoved(B), RunEnded(A, 1.0), RunEnded(B, 1.0))[0]
    assert state.held_bytes == 8
    state, instructions = say(state, Prepared(record(2, memory("ILI", 3, 3, 3, 4, 3, 3, 3, parked=3))))
    assert instructions == [Park(B)]
    state, instructions = say(state, BatchLoaded(A))
    assert instructions == []  # nothing begins before
    assert say(state, StateMoved(B))[1] == [Admit(C), Issue(A, 0, 1), Issue(A, 1, 2)]


def test_a_job_that_was_paused_for_long_begins_again_where_the_others_are() -> None:
    state = here(20, HILL, HILL, steps=100)
    state = say(state, StateMoved(B), Wished(B, "pause"), StateMoved(B))[0]
    for _ in range(50):
        state = say(state, BatchLoaded(A), RunEnded(A, 10.0))[0]
    state = say(state, Wished(B, "run"), *[BatchLoaded(B)] * 9, *[BatchLoaded(A)] * 9, StateMoved(B))[0]
    turns: list[int] = []
    for _ in range(8):
        running = state.in_flight[0][0]
        turns.append(running)
        state = say(state, RunEnded(running, 10.0))[0]
    assert turns == [A, B, A, B, A, B, A, B]


def test_compute_time_is_shared_by_weight() -> None:
    weights = (1.0, 2.0, 4.0)
    state = State(100, 1000)
    for k, weight in enumerate(weights):
        state = say(state, Prepared(record(k, HILL, steps=1000, weight=weight)), *[BatchLoaded(JobId(k))] * 1000)[0]
    state = say(state, *[StateMoved(JobId(k)) for k in range(3)])[0]
    launches: Counter[int] = Counter()
    for _ in range(700):
        job = state.in_flight[0][0]
        launches[job] += 1
        state = say(state, RunEnded(job, 3.0))[0]
    assert launches == {A: 100, B: 200, C: 400}


def test_a_jobs_number_is_never_used_again() -> None:
    state = here(6, HILL)
    with pytest.raises(ValueError, match="never be used again: got a second job 0"):
        step(state, Prepared(record(0, LOW)))


# -- runs ----------------------------------------------------------------------------------------------------------------------

FLAT = memory("ILLIWLLILI", 1, 2, 2, 4, 3, 5, 4, 4, 4, 4, 2, 6, 4, 5, 3, 5, 5, 6, 4, 4, 1)


def test_the_run_of_a_job_that_is_alone_goes_on_through_waits_if_it_has_launches() -> None:
    state, instructions = say(State(9, 100), Prepared(record(0, FLAT, steps=1)), BatchLoaded(A), StateMoved(A))
    assert instructions == [Admit(A), Unpark(A), Issue(A, 0, 1), Issue(A, 1, 9)]
    assert state.in_flight == ((A, 2),) and state.held_bytes == 6
    assert say(state, RunEnded(A, 5.0))[1] == [Issue(A, 9, 10), Park(A)]
    copying = memory("IIWIWI", 1, 1, 1, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1)
    instructions = say(State(9, 100), Prepared(record(0, copying, steps=1)), BatchLoaded(A), StateMoved(A))[1]
    assert instructions[-2:] == [Issue(A, 1, 2), Issue(A, 2, 3)]


def test_a_run_ends_before_a_wait_and_before_the_last_move() -> None:
    state = say(State(9, 100), Prepared(record(1, LOW)), StateMoved(B))[0]
    state, instructions = say(state, Prepared(record(0, FLAT, steps=1)), BatchLoaded(A), StateMoved(A))
    assert instructions == [Admit(A), Unpark(A), Issue(A, 0, 1), Issue(A, 1, 4)]
    assert state.in_flight == ((A, 1),)  # 5 bytes at most, and 4 after it
    assert state.held_bytes == 5
    state, instructions = say(state, RunEnded(A, 2.0))
    assert instructions == [Issue(A, 4, 5)]  # the wait
    state, instructions = say(state, WaitEnded(A))
    assert instructions == [Issue(A, 5, 9)]
    assert state.held_bytes == 6
    assert say(state, RunEnded(A, 3.0))[1] == [Issue(A, 9, 10), Park(A)]


def test_a_run_ends_before_the_first_move_for_which_there_is_no_memory() -> None:
    rising = memory("ILLLI", 0, 1, 1, 2, 2, 3, 3, 8, 1, 1, 0)
    other = memory("LWL", 0, 4, 3, 3, 3, 3, 0)
    state = say(State(8, 100), Prepared(record(0, other)), BatchLoaded(A), StateMoved(A), RunEnded(A, 1.0))[0]
    assert state.held_bytes == 3  # the first waits for a copy
    state, instructions = say(state, Prepared(record(1, rising)), BatchLoaded(B), StateMoved(B))
    assert instructions == [Admit(B), Unpark(B), Issue(B, 0, 1), Issue(B, 1, 3)]  # 3 + 8 bytes are too many, 3 + 3 are not
    state, instructions = say(state, RunEnded(B, 1.0))
    assert instructions == []
    state, instructions = say(state, WaitEnded(A))
    assert instructions == [Issue(A, 2, 3)]
    assert say(state, RunEnded(A, 1.0))[1][0] == Issue(B, 3, 4)


def test_a_run_ends_where_the_state_after_it_is_safe() -> None:
    """After three launches neither job could go on: one holds 4 of 9 bytes and needs 5 more, the other 3 and needs 4 more."""
    climbing = memory("ILLLWLI", 1, 1, 1, 2, 1, 2, 2, 4, 4, 4, 4, 9, 1, 1, 1)
    waiting = memory("LWLI", 0, 3, 3, 3, 3, 7, 0, 0, 0)
    state = say(State(9, 100), Prepared(record(0, waiting)), BatchLoaded(A), StateMoved(A), RunEnded(A, 1.0))[0]
    state, instructions = say(state, Prepared(record(1, climbing)), BatchLoaded(B), StateMoved(B))
    assert instructions == [Admit(B), Unpark(B), Issue(B, 0, 1), Issue(B, 1, 2)]
    state, instructions = say(state, RunEnded(B, 1.0))
    assert instructions == [Issue(B, 2, 3)]  # 2 + 7 bytes are enough
    state, instructions = say(state, RunEnded(B, 1.0))
    assert instructions == []
    state, instructions = say(state, WaitEnded(A))
    assert instructions == [Issue(A, 2, 3)]


@pytest.mark.parametrize(("budget", "end"), [(12, 5), (11, 4), (10, 3)])
def test_beside_a_run_in_flight_a_run_has_no_launch_and_fits_beside_all_that_run_needs(budget: int, end: int) -> None:
    instants = memory("LWIIILI", 1, 2, 2, 2, 2, 2, 2, 3, 3, 4, 4, 5, 1, 1, 1)
    tall = memory("ILLI", 1, 1, 1, 8, 1, 3, 1, 1, 1)
    state = say(State(budget, 100), Prepared(record(1, instants)), BatchLoaded(B), StateMoved(B), RunEnded(B, 1.0))[0]
    state = say(state, Prepared(record(0, tall)), BatchLoaded(A), StateMoved(A))[0]
    assert state.in_flight == ((A, 7),)  # the run holds 1 byte at its end
    assert say(state, WaitEnded(B))[1] == [
        Issue(B, 2, end)
    ]  # beside the 8 bytes of the other's first launch, whether that is over or not


def test_runs_in_flight_are_as_many_as_the_depth_and_each_counts_what_its_launches_need() -> None:
    state, instructions = say(
        State(20, 100, depth=2), Prepared(record(0, FLAT)), Prepared(record(1, FLAT)), BatchLoaded(A), BatchLoaded(B),
        StateMoved(A), StateMoved(B),
    )  # fmt: skip
    runs = [instruction for instruction in instructions if isinstance(instruction, Issue)]
    assert runs == [Issue(A, 0, 1), Issue(A, 1, 4), Issue(A, 4, 5), Issue(B, 0, 1), Issue(B, 1, 4), Issue(B, 4, 5)]
    assert state.in_flight == ((A, 1), (B, 1))
    assert state.held_bytes == 4 + 4 + 1
