"""Memory that several processes share and that has no name, so that nothing is left behind however they end.

Whoever creates it hands its file descriptor to the processes that it starts. These may run another interpreter with
other versions of everything: what is shared is bytes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

_IN_MEMORY = Path("/dev/shm")  # where there is none, the system's temporary directory


class SharedMemory:
    """A block of bytes.

    buffer: the bytes, for ``ctypes`` and ``torch.frombuffer``; what is made of them keeps the block alive.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        """Open a block that another process has created; the descriptor may be closed afterwards."""
        self.buffer: Any = mmap.mmap(descriptor, size)


class OwnedMemory(SharedMemory):
    """A block of this process, all zero at first.

    descriptor: to be passed to the processes that it starts; closed with the block.
    """

    def __init__(self, size: int) -> None:
        """Raises OSError when the machine has too little shared memory."""
        # without a name from the start where the system can do that, otherwise from the next instruction on
        self._file = tempfile.TemporaryFile(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None)  # noqa: SIM115
        self.descriptor = self._file.fileno()
        if hasattr(os, "posix_fallocate"):  # now, and not by a signal when the bytes are first written
            os.posix_fallocate(self.descriptor, 0, size)
        os.truncate(self.descriptor, size)
        super().__init__(self.descriptor, size)
