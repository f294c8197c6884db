"""Graders: how a response is compared with the right answer of its row, one idea per file."""
