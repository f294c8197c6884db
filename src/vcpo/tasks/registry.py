"""Finding a task by name.

Built-in tasks register with one line here; a user's own is named ``package.module:Name`` or ``path/to/file.py:Name``.
"""
