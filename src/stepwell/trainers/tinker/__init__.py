"""Training by a service that speaks the Tinker API: the service has the model, and this loop has the data."""
