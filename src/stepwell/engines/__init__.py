"""What an engine is and can do; used by the gateway, the doctor and the weight sync."""
