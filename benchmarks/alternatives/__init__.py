"""Other ways to the same gradient, one per file, each as fast as its idea allows."""
