"""Asynchronous scheduling: the next step is composed before the one before is done."""

from __future__ import annotations


def asynchronous(config):
    """Switch on what the CPU platform switches off."""
    config.scheduler_config.async_scheduling = True


def test_steps_overlap_and_time_does_not(drive):
    """Steps that are composed early still take their turn on the device."""
    engine = drive(after=asynchronous)
    assert engine.core.batch_queue_size == 2
    engine.request("a", outputs=4)
    engine.drain()
    assert engine.partition("a") == [("prefill", 10), ("decode", 30)]


def test_arrival_while_two_steps_are_on_their_way(drive):
    """A request that comes while two steps are queued waits for both."""
    engine = drive(after=asynchronous)
    engine.request("a", outputs=8)
    late = []
    arrival = engine.clock.now + 25_000_000
    engine.during(25, lambda: late.append(engine.request("b", held_only=True)))
    while engine.clock.now < arrival:
        engine.step()
    engine.core.add_request(*late[0])
    engine.drain()
    # It comes in the third step, when the fourth is composed already; the fifth takes it.
    assert engine.partition("b") == [("prefill.wait(step)", 15), ("prefill", 10)]


def test_seats_under_asynchronous_scheduling(drive):
    """The queue waits for seats, to the millisecond, although steps are composed ahead."""
    engine = drive(after=asynchronous, max_num_seqs=1)
    engine.request("a", outputs=3)
    engine.request("b")
    engine.drain()
    stages = engine.partition("b")
    assert [stage for stage, _ in stages] == ["prefill.wait(seats)", "prefill"]
    assert stages[-1] == ("prefill", 10)
