"""`stepwell gateway key`."""

from stepwell.access.access_keys import AccessKeys
from stepwell.access.caller import SessionKey
from stepwell.config.serving import SessionKeySettings
from stepwell.wiring.stdout import say


def run_gateway_key(settings: SessionKeySettings) -> None:
    keys = AccessKeys(settings.control_keys)
    say(keys.session_key(SessionKey(settings.user, settings.capture == "on")))
