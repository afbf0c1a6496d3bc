"""The API dialects that agents may speak. A new one is a file here and a row in `DIALECTS`."""

from stepwell.gateway.dialects.dialect import Dialect
from stepwell.gateway.dialects.messages_dialect import MessagesDialect
from stepwell.gateway.dialects.openai import ChatDialect, CompletionsDialect
from stepwell.gateway.dialects.responses_dialect import ResponsesDialect

DIALECTS: tuple[Dialect, ...] = (ChatDialect(), CompletionsDialect(), MessagesDialect(), ResponsesDialect())
