"""Everything on one machine by one command: `stepwell up`, `stepwell down`, `stepwell status`."""
