"""Proxy between sites and a server: it passes on the requests that sites need, and nothing else.

Flower serves three interfaces at one port. Sites need one of them, ``/v1/fleet``. Over the others, everybody who
has the certificate can submit apps, which are code, and register keys. So Flower's own port is open to the
server's machine only, and the proxy to the network.
"""

from __future__ import annotations

import re
import ssl
import sys
from collections.abc import Sequence

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_ALLOWED = re.compile(rb"/v1/fleet/[a-z-]+")
# Flower sends large messages in pieces of 5 MB
_LARGEST = 64 * 2**20
_SECONDS = 120.0
_OF_A_CONNECTION = {"host", "connection", "content-length", "transfer-encoding", "content-encoding"}


def make_gate(server: str, certificate: str) -> Starlette:
    """Return the web application that passes sites' requests on to Flower and refuses all others.

    Args:
        server: Flower's own address, ``https://127.0.0.1:PORT``.
        certificate: file with the certificate of the authority.
    """
    trust = ssl.create_default_context(cafile=certificate)
    client = httpx.AsyncClient(base_url=server, verify=trust, timeout=_SECONDS, trust_env=False)

    async def forward(request: Request) -> Response:
        path = request.scope["raw_path"]
        if not _ALLOWED.fullmatch(path):
            return Response("only for sites\n", status_code=404)
        content = bytearray()
        async for piece in request.stream():
            content += piece
            if len(content) > _LARGEST:
                return Response("too large\n", status_code=413)
        try:
            answer = await client.post(
                path.decode(), content=bytes(content), headers=_passed(request.headers.items())
            )
        except httpx.TransportError:
            return Response("the server is being restarted\n", status_code=503)
        headers = dict(_passed(answer.headers.multi_items()))
        return Response(answer.content, status_code=answer.status_code, headers=headers)

    return Starlette(routes=[Route("/{path:path}", forward, methods=["POST"])])


def _passed(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in _OF_A_CONNECTION]


def main(host: str, port: str, server: str, authority: str, certificate: str, key: str) -> None:
    """Run the proxy between sites and Flower until SIGTERM."""
    uvicorn.run(
        make_gate(server, authority),
        host=host,
        port=int(port),
        ssl_certfile=certificate,
        ssl_keyfile=key,
        log_level="warning",
        access_log=False,
        server_header=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
