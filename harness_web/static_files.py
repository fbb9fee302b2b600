"""Style sheets, scripts and icons, from the installed applications and without a collecting step."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from whitenoise.middleware import WhiteNoiseMiddleware
from whitenoise.responders import StaticFile


class StaticFilesMiddleware(WhiteNoiseMiddleware):  # type: ignore[misc]  # the package has no types
    """WhiteNoise, answering with whole bodies: a file iterator is synchronous and ASGI would complain about each."""

    @staticmethod
    def serve(static_file: StaticFile, request: HttpRequest) -> HttpResponse:
        found = static_file.get_response(request.method, request.META)
        body = b""
        if found.file is not None:
            with found.file:
                body = found.file.read()
        response = HttpResponse(body, status=int(found.status))
        del response["Content-Type"]  # its own is among the headers, or there is none
        for name, value in found.headers:
            response[name] = value
        if body:  # a file that was replaced since it was found may have another size
            response["Content-Length"] = str(len(body))
        return response
