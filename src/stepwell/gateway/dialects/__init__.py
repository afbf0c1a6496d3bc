"""The API dialects that agents may speak. A new one is a file here and a row in `DIALECTS`."""

from stepwell.gateway.dialects.anthropic.messages_dialect import MessagesDialect
from stepwell.gateway.dialects.chat import ChatDialect
from stepwell.gateway.dialects.completions import CompletionsDialect
from stepwell.gateway.dialects.dialect import Dialect
from stepwell.gateway.dialects.responses.responses_dialect import ResponsesDialect

DIALECTS: tuple[Dialect, ...] = (ChatDialect(), CompletionsDialect(), MessagesDialect(), ResponsesDialect())
