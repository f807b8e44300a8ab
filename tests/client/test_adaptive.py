"""The adaptive window's single rules: bounds, reasons, refusals, demand, odd input."""

from __future__ import annotations

import math

import pytest

from fullbore.errors import ConfigError
from fullbore.limits import AdaptiveConfig, AdaptiveLimiter, Move, Outcome, make_limiter
from fullbore.limits.adaptive import AdaptiveWindow
from fullbore.limits.roofline import LoadTable, Roofline
from fullbore.limits.simulate import Load, SlotServer, constant, simulate, steps


def run(
    server: SlotServer, *, seconds: float, load: Load | None = None, **bounds: int
) -> tuple[AdaptiveWindow, list[Move]]:
    moves: list[Move] = []
    window = AdaptiveWindow(AdaptiveConfig(**bounds), on_move=moves.append)
    simulate(server, window, load or Load(noise=0.2, network=0.05), marks=[0, seconds], seed=3)
    return window, moves


@pytest.mark.parametrize(
    "bounds",
    [{"minimum": 0}, {"start": 5, "minimum": 6}, {"start": 50, "maximum": 49}],
    ids=["below-one", "start-below-minimum", "start-above-maximum"],
)
def test_bounds_that_cannot_work_are_refused(bounds: dict[str, int]) -> None:
    """The error names the three numbers."""
    with pytest.raises(ConfigError, match=r"minimum=.*start=.*maximum="):
        AdaptiveConfig(**bounds)


def test_auto_is_adaptive_and_starts_at_sixteen() -> None:
    """What `make_limiter` gives without arguments."""
    limiter = make_limiter()
    assert isinstance(limiter, AdaptiveLimiter)
    assert (limiter.limit, limiter.headroom()) == (16, 16)


def test_the_limit_stays_within_its_bounds() -> None:
    """Both ends hold, whatever the endpoint."""
    _, moves = run(SlotServer(constant(math.inf)), seconds=30, maximum=100)
    assert max(move.new for move in moves) == 100
    _, moves = run(SlotServer(constant(9), accepts=constant(2)), seconds=30, minimum=4, start=8)
    assert min(move.new for move in moves) == 4


def test_growth_says_why() -> None:
    """One doubling at first, more without a queue, then the size at which the endpoint is full."""
    window, moves = run(SlotServer(constant(64)), seconds=40)
    assert [move.reason for move in moves[:2]] == ["slow_start", "throughput_rises"]
    assert (moves[0].old, moves[0].new) == (16, 32)
    assert any(move.reason == "endpoint_full" for move in moves)
    assert all(move.detail for move in moves)
    assert 60 <= window.limit <= 110


def test_no_doubling_where_answers_come_one_by_one() -> None:
    """Sixteen requests at one slot: the last of the first ones took sixteen times the first."""
    _, moves = run(SlotServer(constant(1)), seconds=120)
    assert moves[0].new < 16
    assert all(move.reason not in {"slow_start", "throughput_rises"} for move in moves)


def test_a_caller_with_little_to_send_does_not_drive_the_limit_up() -> None:
    """Flat latency proves nothing when the window is not what binds."""
    window, _ = run(
        SlotServer(constant(500)),
        seconds=60,
        load=Load(noise=0.2, network=0.05, demand=constant(10)),
    )
    assert window.limit == 16


def test_a_ceiling_is_remembered_and_tried_rarely() -> None:
    """The limit sits at what is accepted; a probe puts one more above it."""
    window, moves = run(SlotServer(constant(math.inf), accepts=constant(20)), seconds=200)
    # One or two more may be held than are accepted: some are on the wire.
    assert 20 <= window.limit <= 23
    assert window.ceiling is not None
    assert window.ceiling >= 20
    probes = [move for move in moves if move.reason == "probe_ceiling"]
    assert 3 <= len(probes) <= 20
    assert all(move.new == move.old + 1 for move in probes)


def test_a_ceiling_that_rises_is_found() -> None:
    """Steps above the old ceiling double as long as they are accepted."""
    window, moves = run(
        SlotServer(constant(math.inf), accepts=steps((0, 20), (50, 90))), seconds=120
    )
    assert any(move.reason == "ceiling_rose" for move in moves)
    assert 88 <= window.limit <= 91


def finish(window: AdaptiveWindow, kind: str, *, times: int, held: int) -> None:
    """End `times` requests at a steady load of `held`, a millisecond apart."""
    now = window._now
    for _ in range(times):
        mark = window.admitted(now=now, in_flight=held)
        now += 0.001
        outcome = Outcome(kind=kind, total=0.001)  # type: ignore[arg-type]
        window.finished(outcome, now=now, started=now - 0.001, mark=mark, in_flight=held)


def test_a_burst_of_refusals_lands_on_what_was_accepted() -> None:
    """Sixteen sent, one accepted: the refused ones are not replaced, so one remains."""
    window = AdaptiveWindow()
    marks = [window.admitted(now=0.0, in_flight=number) for number in range(1, 17)]
    for in_flight in range(16, 1, -1):
        window.finished(
            Outcome(kind="overloaded", total=0.1),
            now=0.1,
            started=0.0,
            mark=marks[in_flight - 1],
            in_flight=in_flight,
        )
    assert window.limit == 1


def test_failures_halve_the_limit_but_not_below_the_start() -> None:
    """Most requests of a round failed: less, in case it is the load; never down to nothing."""
    moves: list[Move] = []
    window = AdaptiveWindow(AdaptiveConfig(start=16, maximum=64), on_move=moves.append)
    finish(window, "ok", times=400, held=60)
    assert window.limit > 32
    finish(window, "failed", times=3000, held=window.limit)
    assert window.limit == 16
    assert moves[-1].reason == "failures"


def test_cancelled_requests_say_nothing() -> None:
    """However many."""
    window = AdaptiveWindow()
    finish(window, "cancelled", times=1000, held=16)
    assert window.limit == 16


def test_answers_that_take_no_time_are_left_out() -> None:
    """A clock too coarse for the endpoint gives no samples and no division by zero."""
    moves: list[Move] = []
    window = AdaptiveWindow(on_move=moves.append)
    for _ in range(200):
        mark = window.admitted(now=1.0, in_flight=16)
        outcome = Outcome(kind="ok", total=0.0)
        window.finished(outcome, now=1.0, started=1.0, mark=mark, in_flight=16)
    assert [move.reason for move in moves] == ["slow_start"]


@pytest.mark.parametrize(
    ("truth", "full_at"),
    [
        pytest.param(Roofline(base=1.0, slope=0.0, knee=40.0), 40, id="slots"),
        pytest.param(Roofline(base=1.0, slope=0.005, knee=64.0), 64, id="batch"),
    ],
)
def test_the_roofline_is_recovered(truth: Roofline, full_at: float) -> None:
    """From exact latencies at a few loads, the knee within the distance of two levels."""
    table = LoadTable()
    for load in (8, 16, 24, 32, 40, 48, 64, 80, 100, 128):
        for tokens in (10, 20, 40):
            table.add(load, truth.latency(load) * tokens, tokens)
    table.close_round()
    fit = table.fit(near=full_at)
    assert fit is not None
    assert fit.best.knee == pytest.approx(full_at, rel=0.12)
    assert fit.best.throughput(200) == pytest.approx(truth.throughput(200), rel=0.03)


def test_tokens_are_the_unit_where_they_explain_the_time() -> None:
    """Answers of very different lengths at one speed have one latency a token."""
    table = LoadTable()
    for tokens in (1, 10, 100, 1000):
        table.add(8, tokens * 0.01, tokens)
    table.close_round()
    (point,) = table.points()
    assert point.latency == pytest.approx(0.01)


def test_a_level_is_known_better_for_every_round_that_saw_it() -> None:
    """However many samples one round has, and however alike they are: they may share their fate."""
    table = LoadTable()
    errors = []
    for _ in range(4):
        for _ in range(100):
            table.add(8, 1.0, 0)
        table.close_round()
        (point,) = table.points()
        errors.append(math.sqrt(point.variance))
    assert errors[0] > 0.05
    assert errors[3] < 0.03


def test_an_endpoint_that_changed_is_noticed() -> None:
    """Twice as slow at the same load: what was known is dropped."""
    table = LoadTable()
    for seconds, changed in ((1.0, False), (1.0, False), (2.0, True)):
        for number in range(16):
            table.add(16, seconds * (1 + 0.01 * (number % 2)), 0)
        assert table.close_round() is changed
    (point,) = table.points()
    assert point.latency == pytest.approx(2.0, rel=0.1)


def test_a_lower_load_that_does_better_than_every_higher_one_tells_of_a_change() -> None:
    """A queue costs no throughput: four at once cannot be served faster than sixteen were."""
    table = LoadTable()
    for load, seconds, changed in ((16, 16.0, False), (8, 8.0, False), (4, 1.0, True)):
        for number in range(16):
            table.add(load, seconds * (1 + 0.01 * (number % 2)), 0)
        assert table.close_round() is changed
