"""What the learner's benchmark measures with: cells, workloads, timing, peak memory, FLOP counts, tables."""
