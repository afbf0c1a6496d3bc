"""The gateway: FastAPI towards agents, plain HTTP connections towards engines. It holds nothing that it cannot lose."""
