"""What a replay says in text."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.core.replays import replayed


def test_the_widest_figures_of_a_table_do_not_touch() -> None:
    report, _ = replayed(("single",), count=40)
    (result,) = report.policies.values()
    long = {"p50": 1234.0, "p95": 1234.0, "p99": 1234.0}
    wide = {
        name: replace(tier, requests=10**8, ttft=long, e2e=long, share_received=1.0, share_expected=1.0)
        for name, tier in result.tiers.items()
    }
    report.policies["single"] = replace(result, tiers=wide)
    lines = report.as_text().splitlines()
    for row in report.rows(report.policies["single"]):
        cells = r"\s+".join(re.escape(cell) for cell in row)
        assert any(re.search(rf"(^|\s){cells}$", line) for line in lines), row
