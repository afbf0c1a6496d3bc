"""The gateway: FastAPI towards agents, aiohttp towards vLLM. It holds nothing that it cannot lose."""
