"""Lets a request in, or says why not; and records control calls."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NoReturn, TypeAlias

from stepwell.access.access_keys import AccessKeys
from stepwell.access.audit_log import AuditLog, call_text
from stepwell.access.caller import ANYONE, CALLER, Caller, Role
from stepwell.access.route_table import ROOTS, SAMPLERS, UNRECORDED_ROOTS, Route
from stepwell.errors import Forbidden, NotPermitted

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]
Application: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]

HOW = "send it as the header Authorization: Bearer KEY, or x-api-key: KEY"
NO_STATUS = 0
"""The status, in the record, of a call that was not answered."""


class RouteGuard:
    def __init__(self, keys: AccessKeys, audit: AuditLog | None = None) -> None:
        self.keys = keys
        self._audit = audit

    def admit(
        self,
        route: Route,
        scope: Message,
        *authorizations: str | bytes | None,
        channel: str | None = None,
        person: Caller | None = None,
    ) -> Caller:
        """Forbidden without a valid key. NotPermitted if its role or scope does not allow it; `channel` is the one that
        the request is about, if that is known already. `person` needs no key: they are logged in."""
        if route.is_open:
            return ANYONE
        caller = person or self.keys.caller(*authorizations)
        if caller is None:
            raise Forbidden(self.keys.why_void(*authorizations) or needs_key(route))
        if not self.keys.open and caller.role is not Role.ADMIN:
            self._check(route, scope, caller, channel)
        return caller

    def refuse(self, route: Route, scope: Message, caller: Caller, why: str) -> NoReturn:
        """NotPermitted. It is recorded if the call would be."""
        if self._audit is not None and route.is_recorded:
            self._audit.add(caller, call_text(scope), 403)
        raise NotPermitted(why)

    def _check(self, route: Route, scope: Message, caller: Caller, channel: str | None) -> None:
        if caller.role not in route.roles:
            self.refuse(route, scope, caller, wrong_role(route, caller))
        if caller.is_scoped and not route.is_for_scoped:
            why = f"the key {caller.id} is for {caller.scope_text}; this is about all channels"
            self.refuse(route, scope, caller, why)
        if channel is not None and not caller.may_use(channel):
            why = f"the key {caller.id} is for {caller.scope_text}; this is in the channel {channel}"
            self.refuse(route, scope, caller, why)

    async def serve(
        self, app: Application, route: Route, caller: Caller, scope: Message, receive: Receive, send: Send
    ) -> None:
        """Call the application for an admitted caller, and record the call if it is one that changes something."""
        scope[CALLER] = caller
        if self._audit is None or not route.is_recorded:
            await app(scope, receive, send)
            return
        status = NO_STATUS

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, send_noting_status)
        finally:
            self._audit.add(caller, call_text(scope), status)


def needs_key(route: Route) -> str:
    """The answer to a caller without a valid key."""
    if Role.TRAJECTORY in route.roles:
        which = "the key of the trajectory in the URL (api_key, as POST /init_trajectory gave it)"
    elif Role.SESSION in route.roles:
        which = "a session key (as POST /session_keys or `stepwell gateway key` gives it)"
        if others := route.roles - {Role.SESSION}:
            which += f", a key with the role {' or '.join(sorted(others))}"
    elif route.roles:
        which = f"a key with the role {' or '.join(sorted(route.roles))}"
    else:
        return f"this needs a control key; {HOW}"
    return f"this needs {which}, or a control key; {HOW}"


def wrong_role(route: Route, caller: Caller) -> str:
    others = f"{', '.join(sorted(route.roles))} and " if route.roles else ""
    why = f"{caller.id} has the role {caller.role}; this is for {others}{Role.ADMIN}"
    if caller.role in SAMPLERS and route.path.startswith(ROOTS):
        return f"{why}. {ROOTS[0]} records its calls; yours, which are not recorded, go to {UNRECORDED_ROOTS[0]}"
    if Role.SESSION is caller.role and route.path.startswith(UNRECORDED_ROOTS):
        return f"{why}. Yours, which are recorded, go to {ROOTS[0]}"
    return why
