"""The parts of benchmarks.growth: one file for each axis, and what makes tables, the chart and sizes of the figures."""
