"""The ledger is proved by killing: whatever dies, it has what the engine delivered, to the token, once.

Ten kills here; `make test-faults` does it two hundred times.
"""

from __future__ import annotations

import pytest

from tests.faults import killing
from tests.faults.books import Made, Row, audit
from tests.faults.load import Fate, Receipt

pytestmark = pytest.mark.journey

KILLS = 10


def test_whatever_is_killed_the_ledger_has_what_the_engine_delivered(capsys: pytest.CaptureFixture[str]) -> None:
    """FR-073 d."""
    outcome = killing.run(KILLS, seed=29, most_pause=1.0)
    with capsys.disabled():
        print(f"\n{outcome.table()}")  # noqa: T201 - what was found is worth reading also when nothing is wrong
    assert outcome.wrong == []
    assert outcome.kills.total() == KILLS
    assert all(sum(outcome.kills[name] for name in kind) >= 2 for kind in killing.KINDS)
    assert outcome.audit.interrupted > 0
    assert outcome.fates[Fate.ANSWERED] > 0
    assert outcome.audit.tokens > 1_000


class TestAudit:
    """What compares the books finds what is wrong with them."""

    ROW = Row("a", "finished", 3, 10, 0, 0.1)
    MADE = Made(10, torn=False)
    ANSWERED = Receipt(Fate.ANSWERED, "a", 200, "", 3, 10)

    def wrong(self, rows: list[Row], made: dict[str, Made], *receipts: Receipt) -> list[str]:
        return audit(rows, made, receipts).wrong

    def test_books_that_agree(self) -> None:
        assert self.wrong([self.ROW], {"a": self.MADE}, self.ANSWERED) == []

    def test_a_row_that_is_lost(self) -> None:
        assert self.wrong([], {"a": self.MADE}) == ["a made 10 tokens and is not in the ledger"]

    def test_a_row_that_is_there_twice(self) -> None:
        assert self.wrong([self.ROW, self.ROW], {"a": self.MADE}) == ["a is in the ledger twice"]

    @pytest.mark.parametrize("tokens", [9, 11])
    def test_a_token_too_many_or_too_few(self, tokens: int) -> None:
        assert len(self.wrong([self.ROW], {"a": Made(tokens, torn=False)})) == 1

    def test_a_row_of_something_that_never_ran(self) -> None:
        assert len(self.wrong([self.ROW], {})) == 1

    def test_a_caller_who_saw_something_else(self) -> None:
        assert len(self.wrong([self.ROW], {"a": self.MADE}, Receipt(Fate.ANSWERED, "a", 200, "", 3, 11))) == 1
        assert len(self.wrong([self.ROW], {"a": self.MADE}, Receipt(Fate.CUT, "a", 200, "", 0, 11))) == 1

    def test_a_caller_without_a_last_word(self) -> None:
        assert len(self.wrong([], {}, Receipt())) == 1
