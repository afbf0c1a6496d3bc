"""A small OIDC provider over real HTTP: the code flow with PKCE and tokens with real signatures, and switches for lies.

It lets everyone in at once, as the person whom the test names.
"""

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlencode

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from joserfc import jwt
from joserfc.jwk import KeySet, OctKey, RSAKey

from rig.browser import in_thread

CLIENT_ID, CLIENT_SECRET = "stepwell-of-the-tests", "a-client-secret-of-the-tests"
KEY = RSAKey.generate_key(2048, {"kid": "first"})
FOREIGN_KEY = RSAKey.generate_key(2048, {"kid": "first"})
"""Of somebody else, who names it like the provider's."""
ABSENT = "(absent)"
"""A claim that is left out."""


@dataclass
class OidcProvider:
    url: str = ""
    person: dict[str, Any] = field(default_factory=dict)
    """What the ID token says of the person who logs in."""
    userinfo: dict[str, Any] = field(default_factory=dict)
    """What is said of them on request only."""
    lies: dict[str, Any] = field(default_factory=dict)
    """Claims that replace the right ones."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Fields that replace those of the document."""
    signature: str = "RS256"
    """RS256, foreign, HS256 (with the client's secret) or none."""
    has_id_token: bool = True
    asked: list[dict[str, str]] = field(default_factory=list)
    """What browsers brought from the dashboard."""
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        return {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/keys",
            "userinfo_endpoint": f"{self.url}/userinfo",
            "response_types_supported": ["code"],
            "subject_types_supported": ["public"],
            "scopes_supported": ["openid", "email", "profile"],
            "id_token_signing_alg_values_supported": ["RS256"],
            **self.metadata,
        }

    def authorize(self, asked: dict[str, str]) -> str:
        """Where the browser is sent back to."""
        self.asked.append(asked)
        assert asked["client_id"] == CLIENT_ID
        assert asked["response_type"] == "code"
        assert asked["code_challenge_method"] == "S256"
        code = secrets.token_urlsafe()
        self.codes[code] = asked
        return f"{asked['redirect_uri']}?{urlencode({'code': code, 'state': asked['state']})}"

    def token(self, authorization: str, given: dict[str, str]) -> tuple[int, dict[str, Any]]:
        expected = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        asked = self.codes.pop(given.get("code", ""), None)
        if authorization != f"Basic {expected}":
            return 401, {"error": "invalid_client"}
        challenge = _encoded(hashlib.sha256(given.get("code_verifier", "").encode()).digest())
        if (
            asked is None
            or challenge != asked["code_challenge"]
            or given.get("redirect_uri") != asked["redirect_uri"]
            or given.get("grant_type") != "authorization_code"
        ):
            return 400, {"error": "invalid_grant"}
        tokens = {"access_token": secrets.token_urlsafe(), "token_type": "Bearer", "expires_in": 300}
        return 200, {**tokens, "id_token": self._id_token(asked["nonce"])} if self.has_id_token else tokens

    def _id_token(self, nonce: str) -> str:
        now = int(time.time())
        claims = {"iss": self.url, "aud": CLIENT_ID, "exp": now + 300, "iat": now, "nonce": nonce, "sub": "id-of-them"}
        claims = {name: value for name, value in {**claims, **self.person, **self.lies}.items() if value is not ABSENT}
        if self.signature == "none":
            return ".".join(_encoded(json.dumps(part).encode()) for part in ({"alg": "none"}, claims)) + "."
        if self.signature == "HS256":
            secret = OctKey.import_key(CLIENT_SECRET)
            return jwt.encode({"alg": "HS256"}, claims, secret, algorithms=["HS256"])
        key = FOREIGN_KEY if self.signature == "foreign" else KEY
        return jwt.encode({"alg": "RS256", "kid": "first"}, claims, key)


def _encoded(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def provider_app(provider: OidcProvider) -> FastAPI:
    app = FastAPI()

    @app.get("/.well-known/openid-configuration")
    async def document() -> Response:
        return JSONResponse(provider.document())

    @app.get("/authorize")
    async def authorize(request: Request) -> Response:
        return RedirectResponse(provider.authorize(dict(request.query_params)), 302)

    @app.post("/token")
    async def token(request: Request) -> Response:
        given = {name: values[0] for name, values in parse_qs((await request.body()).decode()).items()}
        status, body = provider.token(request.headers.get("authorization", ""), given)
        return JSONResponse(body, status)

    @app.get("/keys")
    async def keys() -> Response:
        return JSONResponse(KeySet([KEY]).as_dict(private=False))

    @app.get("/userinfo")
    async def userinfo() -> Response:
        return JSONResponse({"sub": "id-of-them", **provider.person, **provider.userinfo})

    return app


@contextmanager
def serve_provider(**how: Any) -> Iterator[OidcProvider]:
    """On a free loopback port."""
    provider = OidcProvider(**how)
    with in_thread(provider_app(provider)) as url:
        provider.url = url
        yield provider
