"""What a request and a response are, below the calls."""
