"""The mathematics: pure functions on tensors. Knows no other package of this project."""
