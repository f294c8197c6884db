"""Attacks and accidents: programs that a sandbox has to contain, and how each of them ends."""

from __future__ import annotations

from dataclasses import dataclass

from vcpo.sandbox.protocol import Status

OK, ERROR, TIMEOUT, MEMORY = Status.OK, Status.ERROR, Status.TIMEOUT, Status.MEMORY
OUTPUT_LIMIT, KILLED = Status.OUTPUT_LIMIT, Status.KILLED

MARK = "vcpo-escaped"  # name of a process that must not survive; at most 15 characters


@dataclass(frozen=True)
class Attack:
    """A program and its end.

    code: where @SECRET@, @PORT@, @SOCKET@ and @PID@ stand for a file, a TCP port, an abstract Unix socket and a process
        of the machine outside.
    ends: the statuses that it may end with. stdout, stderr: what must be in there.
    """

    name: str
    code: str
    ends: tuple[Status, ...] = (OK,)
    stdout: str = ""
    stderr: str = ""
    stdin: str = ""
    exit_code: int | None = None


_LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_SLEEPER = f"""
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"{MARK}", 0, 0, 0)
"""

ATTACKS = [
    # too much of something
    Attack(
        "fork_bomb",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        (TIMEOUT, KILLED, MEMORY),
    ),
    Attack(
        "thread_bomb",
        "import threading, time\ntry:\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "except RuntimeError:\n    print('refused')",
        (OK, MEMORY, KILLED),
    ),
    Attack("memory_bomb", "x = 'a' * 10**12", (MEMORY,)),
    Attack("memory_creeping", "x = []\nwhile True:\n    x.append(bytearray(1 << 20))", (MEMORY,)),
    Attack(
        "memory_of_many_children",
        "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n"
        "        x = bytearray(os.urandom(1)) * (60 << 20)\n        time.sleep(60)\ntime.sleep(60)",
        (MEMORY,),
    ),
    Attack("endless_stdout", "while True:\n    print('x' * 1000)", (OUTPUT_LIMIT,), stdout="x" * 1000),
    Attack("endless_stderr", "import sys\nwhile True:\n    print('x' * 1000, file=sys.stderr)", (OUTPUT_LIMIT,)),
    Attack("one_endless_line", "import sys\nsys.stdout.write('x' * 10**7)", (OUTPUT_LIMIT,)),
    Attack("endless_exception", "raise ValueError('x' * 10**6)", (OUTPUT_LIMIT,)),
    Attack("huge_file", "open('big', 'wb').write(bytes(1 << 25))", (ERROR,), stderr="File too large"),
    Attack(
        "many_files",
        "for i in range(1000):\n    open(f'f{i}', 'wb').write(bytes(1 << 18))",
        (ERROR,),
        stderr="No space left",
    ),
    Attack(
        "fill_shared_memory",
        "for i in range(1000):\n    open(f'/dev/shm/f{i}', 'wb').write(bytes(1 << 18))",
        (ERROR,),
        stderr="No space left",
    ),
    Attack("memory_in_a_nameless_file", "import os\nos.memfd_create('x')", (ERROR,), stderr="PermissionError"),
    Attack("many_open_files", "x = [open('/dev/null') for _ in range(10**4)]", (ERROR,), stderr="Too many open files"),
    Attack("sleep", "import time\ntime.sleep(10**6)", (TIMEOUT,)),
    Attack("busy_loop", "while True:\n    pass", (TIMEOUT,)),
    Attack("busy_loop_in_c", "sum(range(10**15))", (TIMEOUT,)),
    Attack("tower_of_powers", "print(9**9**9**9)", (TIMEOUT, MEMORY)),
    Attack(
        "busy_loop_deaf_to_signals",
        "import signal\nfor n in range(1, 65):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass",
        (TIMEOUT,),
    ),
    Attack("stopped_by_itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", (TIMEOUT,)),
    Attack(
        "thread_that_never_ends",
        "import threading\nthreading.Thread(target=threading.Event().wait).start()",
        (TIMEOUT,),
    ),
    Attack("exit_handler_that_never_ends", "import atexit, time\natexit.register(time.sleep, 10**6)", (TIMEOUT,)),
    Attack("deep_recursion", "def f(): return f()\nf()", (ERROR,), stderr="RecursionError"),
    Attack(
        "recursion_without_a_limit",
        "import sys\nsys.setrecursionlimit(10**9)\nf = lambda x: sorted([1], key=f)\nf(1)",
        (KILLED, MEMORY, ERROR),
    ),
    Attack("deep_nesting", "eval('(' * 10**4)", (ERROR, MEMORY, KILLED), stderr="Error"),
    Attack(
        "raise_every_limit",
        "import resource\nfor name in dir(resource):\n    if name.startswith('RLIMIT_'):\n"
        "        what = getattr(resource, name)\n        soft, hard = resource.getrlimit(what)\n"
        "        if hard != resource.RLIM_INFINITY:\n            try:\n"
        "                resource.setrlimit(what, (hard + 1, hard + 1))\n                print('raised', name)\n"
        "            except (ValueError, OSError):\n                pass\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[1] < 1 << 40, 'kept')",
        stdout="True kept",
    ),
    Attack("more_than_its_share", "import os\nos.nice(-10)", (ERROR,), stderr="PermissionError"),
    Attack(
        "real_time_priority",
        "import os\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))",
        (ERROR,),
        stderr="PermissionError",
    ),
    # our files, environment and processes
    Attack("read_our_file", "print(open('@SECRET@').read())", (ERROR,), stderr="FileNotFoundError"),
    Attack("read_users", "print(open('/etc/passwd').read())", (ERROR,), stderr="FileNotFoundError"),
    Attack(
        "look_around",
        "import os\nfor path in ('/home', '/var', '/work', '/opt', '/srv', '/run', '/mnt', '/boot', '/bin',"
        " '/usr/bin/sh', '/sys', '/proc', '/etc/shadow'):\n    assert not os.path.exists(path), path",
    ),
    Attack("our_environment", "import os\nprint(len([v for v in os.environ.values() if 'sesame' in v]))", stdout="0"),
    Attack("processes_in_proc", "import os\nprint(os.listdir('/proc'))", (ERROR,), stderr="FileNotFoundError"),
    Attack(
        "symbolic_link_to_our_file",
        "import os\nos.symlink('@SECRET@', 'x')\nprint(open('x').read())",
        (ERROR,),
        stderr="FileNotFoundError",
    ),
    Attack(
        "climb_out", "print(open('../' * 30 + '@SECRET@'.lstrip('/')).read())", (ERROR,), stderr="FileNotFoundError"
    ),
    Attack("hard_link_to_a_library", "import os\nos.link(os.__file__, 'x')", (ERROR,), stderr="OSError"),
    Attack(
        "write_to_what_is_read_only",
        "import os, sys\nfor path in ('/x', '/usr/x', '/usr/lib/x', '/dev/x', '/runner.py', os.__file__, '/etc/x',"
        " sys.executable):\n    try:\n        open(path, 'a')\n        print('written', path)\n"
        "    except OSError:\n        pass\nprint('end')",
        stdout="end",
    ),
    Attack("signal_to_us", "import os\nos.kill(@PID@, 9)", (ERROR,), stderr="ProcessLookupError"),
    Attack("signal_to_its_parent", "import os\nos.kill(os.getppid(), 15)\nos.kill(os.getppid(), 9)", (OK, ERROR)),
    Attack("signal_to_everybody", "import os\nos.kill(-1, 9)\nprint('alone')", (OK, ERROR, KILLED)),
    Attack("signal_to_its_group", "import os\nos.killpg(0, 9)", (KILLED,)),
    Attack(
        "our_descriptors",
        "import os\nfor n in range(3, 64):\n    try:\n        os.fstat(n)\n        print('open', n)\n"
        "    except OSError:\n        pass\nprint('end')",
        stdout="end",
    ),
    Attack("terminal", "open('/dev/tty', 'w').write('x')", (ERROR,), stderr="/dev/tty"),
    Attack(
        "devices",
        "import os\nassert set(os.listdir('/dev')) <= {'null', 'zero', 'full', 'random', 'urandom', 'shm'}\n"
        "print(len(open('/dev/urandom', 'rb').read(8)))",
        stdout="8",
    ),
    Attack(
        "make_a_device",
        "import os, stat\nos.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))",
        (ERROR,),
        stderr="PermissionError",
    ),
    # the network
    Attack(
        "connect_to_us",
        "import socket\nsocket.create_connection(('127.0.0.1', @PORT@), timeout=1)",
        (ERROR,),
        stderr="ConnectionRefusedError",
    ),
    Attack(
        "send_to_us",
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @PORT@))",
        (OK, ERROR),
    ),
    Attack(
        "connect_to_our_unix_socket",
        "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0@SOCKET@')",
        (ERROR,),
        stderr="ConnectionRefusedError",
    ),
    Attack(
        "names_of_machines",
        "import socket\nprint(socket.gethostname())\nsocket.gethostbyname('example.org')",
        (ERROR,),
        stdout="sandbox",
    ),
    Attack(
        "unusual_sockets",
        "import socket\nfor family in (16, 17, 38, 40):\n    try:\n"
        "        socket.socket(family, socket.SOCK_RAW if family == 17 else socket.SOCK_STREAM)\n"
        "        print('open', family)\n    except OSError:\n        pass\nprint('end')",
        stdout="end",
    ),
    # rights
    Attack("become_root", "import os\nos.setuid(0)", (ERROR,), stderr="os.setuid(0)"),
    Attack("change_root", "import os\nos.chroot('/tmp')", (ERROR,), stderr="PermissionError"),
    Attack(
        "new_namespaces",
        _LIBC + "import platform\nclone = {'x86_64': 56, 'aarch64': 220}[platform.machine()]\n"
        "for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000):\n"
        "    assert libc.unshare(flag) == -1\n    pid = libc.syscall(clone, flag | 17, 0, 0, 0, 0)\n"
        "    if pid == 0:\n        os._exit(0)\n    assert pid == -1\nprint('refused')",
        stdout="refused",
    ),
    Attack("trace", _LIBC + "print(libc.ptrace(0, 0, 0, 0), ctypes.get_errno())", stdout="-1 1"),
    Attack("mount", _LIBC + "print(libc.mount(0, b'/tmp', b'tmpfs', 0, 0), ctypes.get_errno())", stdout="-1 1"),
    Attack("numbers_of_another_system", _LIBC + "print(libc.syscall(0x40000000 + 39))", stdout="-1"),
    Attack("run_a_shell", "import os\nos.execv('/bin/sh', ['sh'])", (ERROR,), stderr="FileNotFoundError"),
    Attack("run_a_program", "import subprocess\nsubprocess.run(['ls'])", (ERROR,), stderr="FileNotFoundError"),
    Attack(
        "run_python_again",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-I', '-S', '-c',"
        " 'import os; print(os.path.exists(\"@SECRET@\"))'])",
        stdout="False",
    ),
    # what stays behind
    Attack(
        "child_that_stays",
        "import os\nif os.fork() == 0:\n" + _SLEEPER.replace("\n", "\n    ") + "\n    time.sleep(10**6)",
    ),
    Attack(
        "daemon",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        + _SLEEPER.replace("\n", "\n        ")
        + "\n        os.closerange(0, 64)\n        time.sleep(10**6)\n    os._exit(0)\nos.wait()\nprint('left')",
        stdout="left",
    ),
    Attack(
        "zombies",
        "import os\nfor _ in range(5):\n    if os.fork() == 0:\n        os._exit(0)\nprint('end')",
        stdout="end",
    ),
    # ends, and what is written
    Attack("exit_code", "import sys\nsys.exit(7)", (ERROR,), exit_code=7),
    Attack("exit_as_in_a_session", "exit(3)", (ERROR,), exit_code=3),
    Attack("exit_with_a_sentence", "import sys\nsys.exit('no')", (ERROR,), stderr="no", exit_code=1),
    Attack("exit_at_once", "import os\nprint('lost?', flush=True)\nos._exit(0)", stdout="lost?", exit_code=0),
    Attack("exception", "1 / 0", (ERROR,), stderr="ZeroDivisionError: division by zero", exit_code=1),
    Attack("wrong_syntax", "def f(", (ERROR,), stderr="SyntaxError", exit_code=1),
    Attack("nul_in_the_code", "print(1)\0", (ERROR,), stderr="Error", exit_code=1),
    Attack("half_a_character_in_the_code", "print('\ud800')", (ERROR,), stderr="SyntaxError", exit_code=1),
    Attack("interrupted", "raise KeyboardInterrupt", (ERROR,), stderr="KeyboardInterrupt", exit_code=1),
    Attack("abort", "import os\nos.abort()", (KILLED,)),
    Attack("invalid_memory_access", "import ctypes\nctypes.string_at(0)", (KILLED,)),
    Attack("binary_output", "import sys\nsys.stdout.buffer.write(bytes(range(256)))", stdout="\ufffd"),
    Attack("half_a_character", "import sys\nsys.stdout.buffer.write('é'.encode()[:1])", stdout="\ufffd"),
    Attack("half_a_character_as_text", "print('\\ud800')", (ERROR,), stderr="UnicodeEncodeError"),
    Attack("stdin", "print(input() + input())", stdout="ab", stdin="a\nb\n"),
    Attack("stdin_has_an_end", "import sys\nsys.stdin.read()\ninput()", (ERROR,), stderr="EOFError", stdin="a\n"),
    Attack("stdin_is_not_read", "print('end')", stdout="end", stdin="x" * 10**6),
    Attack("stdin_is_long", "import sys\nprint(len(sys.stdin.read()))", stdout="1000000", stdin="x" * 10**6),
    Attack("closed_descriptors", "import os\nos.closerange(0, 64)", (OK, ERROR)),
    Attack("closed_stdout", "import sys\nsys.stdout.close()\nprint('x')", (ERROR,), stderr="ValueError"),
    Attack("no_stdout", "import sys\nsys.stdout = None\nprint('x')", (OK,)),
    Attack("exit_function_replaced", "import os\nos._exit = lambda code: print('no')", (OK, ERROR)),
]  # fmt: skip
