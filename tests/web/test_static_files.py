"""Style sheets and scripts while the files under a running server change."""

from __future__ import annotations

from pathlib import Path

from django.test import RequestFactory
from whitenoise.responders import StaticFile

from harness_web.static_files import StaticFilesMiddleware


def test_a_file_replaced_by_an_update_is_answered_whole(tmp_path: Path) -> None:
    path = tmp_path / "app.css"
    path.write_text("short")
    found = StaticFile(str(path), [("Content-Type", "text/css")])
    path.write_text("longer than before")

    response = StaticFilesMiddleware.serve(found, RequestFactory().get("/static/app.css"))

    assert response.content == b"longer than before"
    assert response["Content-Length"] == str(len(response.content))


def test_the_headers_of_a_file_name_its_length_without_its_content(tmp_path: Path) -> None:
    path = tmp_path / "app.css"
    path.write_text("short")

    response = StaticFilesMiddleware.serve(StaticFile(str(path), []), RequestFactory().head("/static/app.css"))

    assert response.content == b""
    assert response["Content-Length"] == "5"
