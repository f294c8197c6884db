"""The asynchronous loop: pacing, rollouts, weight publishing, checkpoints. Composes the other packages."""
