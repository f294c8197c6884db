"""Exact per-trajectory gradient norms of any module made of known layers: one rule per layer type."""
