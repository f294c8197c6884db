"""Sampling responses: the protocol that engines fulfil, and the embedded engine."""
