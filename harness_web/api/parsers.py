"""Bodies of the management API: JSON as strict as that of `/v1`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

import msgspec
from rest_framework.exceptions import ParseError
from rest_framework.parsers import JSONParser


class StrictJSONParser(JSONParser):
    """Refuses what the standard library lets pass or breaks on: half a surrogate pair, NaN, bodies nested very deep."""

    def parse(
        self, stream: IO[bytes], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return msgspec.json.decode(stream.read())
        except msgspec.DecodeError as error:
            raise ParseError(f"The body is not JSON: {error}.") from error
        except RecursionError as error:
            raise ParseError("The body is nested too deep.") from error
