"""The gateway's command as it would be without bounds on requests, for comparison."""

import sys
from typing import Any

from stepwell.gateway.requests import CallQuota
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stepwell import cli
from stepwell.access import access_keys
from stepwell.common import bounded_http
from stepwell.gateway import requests as request_body
from stepwell.gateway.dialects import openai as openai_request


def no_quota(_: object) -> CallQuota:
    return CallQuota(in_flight=0, bytes=0)


UNBOUNDED: tuple[tuple[Any, str, Any], ...] = (
    (openai_request, "check_containers", lambda *_: None),
    (request_body, "MOST_CONTAINERS", sys.maxsize),
    (bounded_http, "BoundedHttp", HttpToolsProtocol),
    (CallQuota, "read", no_quota),
    (access_keys, "LONGEST_MESSAGE", sys.maxsize),
)


def main() -> None:
    for place, name, value in UNBOUNDED:
        setattr(place, name, value)
    cli.run("gateway", sys.argv[1:], "python -m benchmarks.attacks_rig.unbounded_gateway")


if __name__ == "__main__":
    main()
