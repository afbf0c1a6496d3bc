"""People who log in at an OIDC provider. Only people.py can be imported without the extra `oidc`."""
