"""The window of a stream, counted."""

from __future__ import annotations

from fullbore_backend.credit import Credits


def test_credit_runs_out_and_is_granted_again() -> None:
    window = Credits()
    window.open("a", 3)
    assert [window.spend("a", 1) for _ in range(3)] == [False, False, True]
    assert window.grant("a", 2)
    assert [window.spend("a", 1) for _ in range(2)] == [False, True]


def test_a_grant_that_comes_in_time_resumes_nothing() -> None:
    window = Credits()
    window.open("a", 2)
    window.spend("a", 1)
    assert not window.grant("a", 1)
    assert not window.spend("a", 1)


def test_a_step_of_several_tokens_may_overshoot_and_is_paid_back() -> None:
    window = Credits()
    window.open("a", 2)
    assert window.spend("a", 4)
    assert not window.grant("a", 2)
    assert window.grant("a", 1)


def test_what_was_never_opened_or_is_closed_has_no_limit() -> None:
    window = Credits()
    window.open("a", 1)
    window.close("a")
    window.close("b")
    for name in "ab":
        assert not window.spend(name, 100)
        assert not window.grant(name, 100)
