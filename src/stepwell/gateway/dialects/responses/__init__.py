"""OpenAI's Responses API: requests are translated to chat messages, answers to output items and events."""
