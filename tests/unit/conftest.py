from hypothesis import HealthCheck, settings

# The machines are shared: how long an example takes says nothing about the code.
settings.register_profile("stepwell", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("stepwell")
