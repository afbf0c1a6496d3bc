"""The dashboard: a page that shows what the pool, the gateways and the engines do, and obeys what a person decides."""
