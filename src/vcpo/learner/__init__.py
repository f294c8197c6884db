"""One optimizer update: packing, log-probabilities, gradient assembly, step size, optimizer."""
