"""A filter of system calls, assembled by hand: what Python code never needs and kernels have been attacked through.

The format is classic BPF as in ``linux/filter.h`` and ``linux/seccomp.h``; bubblewrap loads it right before the
sandboxed program starts. Namespaces and dropped rights protect without it; it makes the kernel a smaller target.
"""

from __future__ import annotations

import errno
import platform
import struct

# system call -> its number on x86_64 and on aarch64
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # looking into other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # file systems and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    # keys, programs for the kernel, and interfaces with a history of holes
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "vhangup": (153, 58),
    "personality": (135, 92),
    # memory that no limit of ours counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
}
_CLONE, _CLONE3, _SOCKET, _IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above; AUDIT_ARCH
_NEW_NAMESPACES = 0x7E020000 | 0x80  # CLONE_NEWNS, -CGROUP, -UTS, -IPC, -USER, -PID, -NET, -TIME
_ADDRESS_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; vsock, for one, has no namespaces
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: typing into a terminal

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


def denied_calls() -> dict[str, int]:
    """The system calls that are refused whatever their arguments, with their numbers on this machine; maybe none."""
    if platform.machine() not in _MACHINES:
        return {}
    column = _MACHINES[platform.machine()][0]
    return {name: number for name, numbers in _NUMBERS.items() if (number := numbers[column]) is not None}


def filter_program() -> bytes | None:
    """The filter for this machine, as ``bwrap --seccomp`` reads it; ``None`` for a processor that it does not know."""
    if platform.machine() not in _MACHINES:
        return None
    column, architecture = _MACHINES[platform.machine()]
    refuse = _instruction(_RETURN, _ERRNO | errno.EPERM)
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, architecture, then=1),
        _instruction(_RETURN, _KILL),  # a call by the numbers of another architecture
        _instruction(_LOAD, _NUMBER),
    ]
    if platform.machine() == "x86_64":  # the x32 numbers
        program += [_instruction(_JUMP_AT_LEAST, 0x40000000, otherwise=1), refuse]
    for number in denied_calls().values():
        program += [_instruction(_JUMP_EQUAL, number, otherwise=1), refuse]
    # its flags lie in memory, where a filter cannot look; C libraries then use clone
    program += [
        _instruction(_JUMP_EQUAL, _CLONE3[column], otherwise=1),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    program += _if_called(_CLONE[column], 0, [_instruction(_JUMP_ANY_BIT, _NEW_NAMESPACES, otherwise=1), refuse])
    families = [
        _instruction(_JUMP_EQUAL, family, then=len(_ADDRESS_FAMILIES) - index)
        for index, family in enumerate(_ADDRESS_FAMILIES)
    ]
    program += _if_called(_SOCKET[column], 0, [*families, refuse])
    requests = [part for r in _TERMINAL_INPUT for part in (_instruction(_JUMP_EQUAL, r, otherwise=1), refuse)]
    program += _if_called(_IOCTL[column], 1, requests)
    return b"".join([*program, _instruction(_RETURN, _ALLOW)])


def _if_called(number: int, argument: int, rules: list[bytes]) -> list[bytes]:
    """Apply rules to the low half of an argument of one call; what they let through is allowed."""
    body = [_instruction(_LOAD, _ARGUMENTS + 8 * argument), *rules, _instruction(_RETURN, _ALLOW)]
    return [_instruction(_JUMP_EQUAL, number, otherwise=len(body)), *body]


def _instruction(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)
