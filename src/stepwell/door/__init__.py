"""The Atropos door: environments bring scored groups, trainers take batches, over HTTP."""
