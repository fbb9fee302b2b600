"""Where a deployment's model is: the folder that an operator names, looked for in the places that he may mean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scheduler.engines.base import EngineStartError


def find_model(value: Any, data_dir: Path, *, must_exist: bool) -> str:
    """The folder that is meant, or the name of a model in the local cache of models.

    Raises EngineStartError if it is no name at all, or a folder that is nowhere.
    """
    if not isinstance(value, str) or not value:
        raise EngineStartError(f"The model {value!r} is refused: it must be a folder or a name.")
    places = list(_places(value, data_dir))
    for place in places:
        if place.is_dir():
            return str(place)
    if must_exist or value.startswith(("/", ".", "~")):
        looked = ", ".join(dict.fromkeys(str(place) for place in places))
        raise EngineStartError(f"There is no model folder {value!r}.", hint=f"Looked for {looked}.")
    return value


def _places(value: str, data_dir: Path) -> Iterator[Path]:
    """Where a relative folder may be: here, in the data directory, beside it (as in `var/models/…`)."""
    path = Path(value).expanduser()
    for base in (Path.cwd(), data_dir, data_dir.parent):
        yield base / path
