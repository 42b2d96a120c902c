"""Benchmarks: workloads, contenders, timing, records and goals."""
