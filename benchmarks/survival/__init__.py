"""What survives: faults in a real cluster, under load, with every call and every step counted."""
