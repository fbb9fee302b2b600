"""Where Celery's messages and schedule go, by configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness_web.celery import configuration


@pytest.mark.parametrize("redis_url", [None, "redis://127.0.0.1:6379/0"])
def test_the_schedule_has_a_private_folder_whoever_carries_the_messages(tmp_path: Path, redis_url: str | None) -> None:
    schedule = Path(configuration(tmp_path / "data", redis_url)["beat_schedule_filename"])
    assert schedule.is_absolute()
    assert schedule.parent.stat().st_mode & 0o777 == 0o700


def test_messages_travel_through_redis_only_where_it_is_named(tmp_path: Path) -> None:
    assert configuration(tmp_path, None)["broker_url"] == "filesystem://"
    assert configuration(tmp_path, "redis://127.0.0.1:6379/0")["broker_url"] == "redis://127.0.0.1:6379/0"


@pytest.mark.parametrize("torn", ["", '[["celery", "", "ce'])
def test_what_a_full_disk_left_half_written_is_taken_away(tmp_path: Path, torn: str) -> None:
    configuration(tmp_path, None)
    control, messages = tmp_path / "celery" / "control", tmp_path / "celery" / "messages"
    (control / "celery.exchange").write_text(torn)
    (control / "whole.exchange").write_text('[["a", "", "a"]]')
    (messages / "1_torn.celery.msg").write_text(torn)
    (messages / "2_whole.celery.msg").write_text("{}")

    configuration(tmp_path, None)

    assert (control / "celery.exchange").read_text() == "[]"
    assert (control / "whole.exchange").read_text() == '[["a", "", "a"]]'
    assert [path.name for path in messages.iterdir()] == ["2_whole.celery.msg"]
