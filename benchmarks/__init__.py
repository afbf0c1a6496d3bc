"""One command each: `python -m benchmarks.NAME`. The last line printed is one JSON object."""
