"""`stepwell doctor`: proves, by real calls, that what a gateway records of an engine is exact, or says what is not."""
