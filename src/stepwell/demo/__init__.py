"""`stepwell demo`: a tiny model, made on the spot, learns from what its agent does, on a bare CPU."""
