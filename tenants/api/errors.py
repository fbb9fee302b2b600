"""What can be wrong with a call of the management API, beyond what the framework knows."""

from __future__ import annotations

from rest_framework.exceptions import APIException


class Conflict(APIException):
    """What is asked for does not fit the state that the thing is in."""

    status_code = 409
