"""Running Python code that may be hostile: executors behind one protocol. Imports without torch."""
