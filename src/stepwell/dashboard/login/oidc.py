"""Logs people in at an OIDC provider: the authorization code flow with PKCE, state and nonce, all of it by Authlib.

- Nothing is stored on the server. An attempt to log in, and then the session, are sealed cookies of the browser.
- A session names the entry of the lists that let its person in. If the entry is removed, the session is void.
- What Authlib leaves to its caller is checked here: the provider's document names the issuer that was asked for and
  safe addresses, the ID token is for this client, and it has a signature that only the provider can make.
"""

import json
import logging
import re
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from authlib.integrations.starlette_client import OAuth, OAuthError
from authlib.oidc.discovery import get_well_known_url
from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from joserfc.errors import JoseError
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response

from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import Caller
from stepwell.common.listening import is_safe_url
from stepwell.dashboard.login import Claims, ListedPeople, name_of
from stepwell.errors import BadRequest, NotPermitted, NotReady

log = logging.getLogger("stepwell.access")

HOST_PREFIX = "__Host-"
SESSION_SECONDS = 8 * 3600
ATTEMPT_SECONDS = 10 * 60
"""The most seconds from /login to /login/callback: as long as a person may take at the provider."""
LEEWAY = 60
"""Seconds by which the provider's clock may differ."""
TIMEOUT = 20.0
"""Seconds for each call to the provider."""
CALLBACK = "login/callback"
HOME = "../"
"""The page, seen from the callback. No request can name another place to go to after a login."""
SCOPE = "openid email profile"
GROUPS = "groups"
SIGNED_BY_PROVIDER = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""The signatures that are accepted: not `none`, and not HS256, because whoever knows the client's secret could sign
with it."""
ALGORITHMS = "id_token_signing_alg_values_supported"
ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")
USERINFO = "userinfo_endpoint"
KEPT = ("issuer", *ENDPOINTS, USERINFO, "scopes_supported", "_loaded_at")
"""The fields of the provider's document that are kept. Its keys are not among them: they are read for each login."""
ERROR_CODE = re.compile(r"[a-z_]{1,60}")


@dataclass(frozen=True, slots=True)
class OidcClient:
    """The client by which the provider knows this dashboard."""

    issuer: str
    client_id: str
    client_secret: str | None = field(default=None, repr=False)


class OidcLogin:
    def __init__(
        self,
        client: OidcClient,
        people: ListedPeople,
        keys: AccessKeys,
        *,
        public_url: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`public_url` is where browsers reach the dashboard, if a proxy is in front of it."""
        if keys.open:
            raise BadRequest("a login needs control keys: its cookie is sealed with a secret that is made from them")
        self._issuer = client.issuer
        self._client_id = client.client_id
        self._people = people
        self._public_url = public_url
        owner = f"\0{client.issuer}\0{client.client_id}".encode()
        attempts, sessions = keys.secrets(b"dashboard login 1" + owner), keys.secrets(b"dashboard session 1" + owner)
        self._attempt = SealedCookie("stepwell-login", attempts, ATTEMPT_SECONDS, clock=clock)
        self._session = SealedCookie("stepwell-session", sessions, SESSION_SECONDS, clock=clock)
        self._app = OAuth().register(
            "oidc",
            client_id=client.client_id,
            client_secret=client.client_secret,
            server_metadata_url=get_well_known_url(client.issuer, external=True),
            client_kwargs={
                "scope": SCOPE,
                "code_challenge_method": "S256",
                "timeout": TIMEOUT,
                "verify": httpx2.create_ssl_context(),  # once: Authlib makes a client for each call
            },
        )

    def caller(self, connection: HTTPConnection) -> Caller | None:
        """Who is logged in, by the cookie of a request."""
        session = self._session.read(connection, is_https=self._is_https(connection))
        role = self._people.role(session["entry"]) if session else None
        return Caller(f"oidc {session['name']}", role) if session and role else None

    async def begin(self, request: Request) -> Response:
        """Sends the browser to the provider. NotReady if that cannot be used."""
        request.scope["session"] = {}
        with self._provider_failures():
            await self._load_metadata()
            answer: Response = await self._app.authorize_redirect(
                request, self._base(request) + CALLBACK, scope=self._scope()
            )
        self._attempt.write(answer, request.session, is_https=self._is_https(request))
        return answer

    async def finish(self, request: Request) -> Response:
        """Ends the login of a browser that the provider sent back: begins its session. BadRequest if the answer is not
        to be trusted, NotPermitted if the person is on no list."""
        request.scope["session"] = self._attempt.read(request, is_https=self._is_https(request)) or {}
        with self._provider_failures():
            await self._load_metadata()
            claims, token = await self._claims(request)
            person = self._people.find(claims) or self._people.find(await self._more_claims(claims, token))
        if person is None:
            name = name_of(claims)
            log.warning("%s of %s is on no list of the dashboard", name, self._issuer)
            raise NotPermitted(
                f"you are logged in at {self._issuer} as {name or 'somebody without a name'}, who is on no list of "
                "this dashboard. Ask its operator to add you, or a group that you are in, to --oidc-viewers or "
                "--oidc-curators. A mail address counts only if the provider has verified it"
            )
        log.info("%s logged in as %s", person.name, self._people.role(person.entry))
        answer = RedirectResponse(HOME, 303)
        session = {"name": person.name, "entry": person.entry}
        self._session.write(answer, session, is_https=self._is_https(request))
        return answer

    def end_attempt(self, request: Request, answer: Response) -> None:
        """Whatever came of it: a state is used once."""
        self._attempt.remove(answer, is_https=self._is_https(request))

    def end_session(self, request: Request, answer: Response) -> None:
        self._session.remove(answer, is_https=self._is_https(request))

    async def _claims(self, request: Request) -> tuple[Claims, Mapping[str, Any]]:
        """The claims of the ID token, which is checked; and the tokens."""
        options = {
            "iss": {"essential": True, "values": [self._issuer]},
            "aud": {"essential": True, "values": [self._client_id]},
        }
        token = await self._app.authorize_access_token(request, claims_options=options, leeway=LEEWAY)
        if not token.get("userinfo"):
            raise ValueError("the provider sent no ID token")
        return token["userinfo"], token

    async def _more_claims(self, claims: Claims, token: Mapping[str, Any]) -> Claims:
        """Some providers tell addresses and groups only when they are asked for them."""
        if USERINFO not in self._app.server_metadata:
            return {}
        more: Claims = await self._app.userinfo(token=token)
        return more if more.get("sub") == claims["sub"] else {}

    async def _load_metadata(self) -> None:
        """NotReady if the provider's document is not to be trusted. Then the next login reads it again."""
        try:
            found = await self._app.load_server_metadata()
        except (ValueError, TypeError):
            raise NotReady(f"{self._issuer} is not an OIDC provider: its document cannot be read") from None
        self._app.server_metadata = {}
        if found.get("issuer") != self._issuer:
            raise NotReady(
                f"the provider at {self._issuer} says that it is {found.get('issuer')}: --oidc-issuer must be the same"
            )
        for name in (*ENDPOINTS, *({USERINFO} & found.keys())):
            if not is_safe_url(str(found.get(name))):
                raise NotReady(f"the {name} of {self._issuer} is {found.get(name)}, and not an https address")
        algorithms = [name for name in found.get(ALGORITHMS, ()) if name in SIGNED_BY_PROVIDER]
        self._app.server_metadata = {**{name: found[name] for name in KEPT if name in found}, ALGORITHMS: algorithms}

    def _scope(self) -> str:
        """A provider may refuse a scope that it does not know."""
        return f"{SCOPE} {GROUPS}" if GROUPS in self._app.server_metadata.get("scopes_supported", ()) else SCOPE

    def _base(self, connection: HTTPConnection) -> str:
        """The address of the page, with a slash at its end."""
        return f"{self._public_url.rstrip('/')}/" if self._public_url else str(connection.base_url)

    def _is_https(self, connection: HTTPConnection) -> bool:
        return self._base(connection).startswith("https:")

    @contextmanager
    def _provider_failures(self) -> Iterator[None]:
        """Turns errors of Authlib into words for the person who logs in. What others wrote is in the log alone."""
        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL) as failure:
            log.warning("the OIDC provider %s cannot be used: %r", self._issuer, failure)
            raise NotReady(f"the provider at {self._issuer} does not answer; try again, or use a key") from None
        except (OAuthError, JoseError, ValueError, TypeError, LookupError, RuntimeError) as failure:
            log.warning("a login at %s was refused: %r", self._issuer, failure)
            code = str(getattr(failure, "error", ""))
            why = f" ({code})" if ERROR_CODE.fullmatch(code) else ""
            raise BadRequest(f"this login is not valid{why}: log in again. The dashboard's log says more") from None


class SealedCookie:
    """A cookie that only this dashboard can read and make: encrypted and signed (Fernet), with an end.

    - Nothing is stored.
    - JavaScript does not see it, and a browser sends it with no request of another site, except when a person follows a
      link or a redirect to the dashboard (SameSite=Lax): that is how a provider sends them back.
    - Under https its name begins with __Host-: a browser takes it only from this host itself, over https.
    """

    def __init__(
        self, name: str, secrets: Sequence[bytes], seconds: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Values are sealed with the first secret, and opened with any. Each has 32 bytes."""
        self._name = name
        self._fernet = MultiFernet([Fernet(urlsafe_b64encode(secret)) for secret in secrets])
        self._seconds = seconds
        self._clock = clock

    def read(self, connection: HTTPConnection, *, is_https: bool) -> dict[str, Any] | None:
        """None if there is none, or one that is forged or too old."""
        sealed = connection.cookies.get(self._full_name(is_https))
        if sealed is None:
            return None
        try:
            opened = self._fernet.decrypt_at_time(sealed.encode(), self._seconds, int(self._clock()))
        except InvalidToken:
            return None
        value: dict[str, Any] = json.loads(opened)
        return value

    def write(self, response: Response, value: Mapping[str, Any], *, is_https: bool) -> None:
        sealed = self._fernet.encrypt_at_time(json.dumps(value).encode(), int(self._clock())).decode()
        self._set(response, sealed, self._seconds, is_https)

    def remove(self, response: Response, *, is_https: bool) -> None:
        self._set(response, "", 0, is_https)

    def _set(self, response: Response, text: str, seconds: int, is_https: bool) -> None:
        response.set_cookie(
            self._full_name(is_https), text, max_age=seconds, path="/", secure=is_https, httponly=True, samesite="lax"
        )

    def _full_name(self, is_https: bool) -> str:
        return f"{HOST_PREFIX}{self._name}" if is_https else self._name
