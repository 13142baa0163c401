# ruff: noqa: E501 - one program a line
"""Attacks that print the right answer only if they get anywhere: a verdict of ``passed`` is a hole in the sandbox.

None may end as ``infra_error`` either: a program that could choose that verdict would never be paid for failing.
"""

from dataclasses import dataclass

_HEAD = """
import ctypes, fcntl, mmap, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def done(*attempts):
    for attempt in attempts:
        try:
            if attempt() not in (-1, False): return True
        except (OSError, ValueError, AttributeError): pass
    return False
def win(won): print(sum(map(int, open(0).read().split())) if won else "no")
def raw(number, *arguments): return libc.syscall(number, *arguments)
def opens(*paths, flags=os.O_RDONLY): return done(*(lambda p=p: os.close(os.open(p, flags)) or True for p in paths))
def child(work):
    pid = os.fork()
    if pid == 0:
        try: work()
        finally: os._exit(0)
    return pid
"""


@dataclass(frozen=True)
class Evasion:
    name: str
    source: str


def _try(name: str, attempts: str, before: str = "") -> Evasion:
    """Wins if any of the expressions works."""
    calls = ", ".join(f"lambda: {attempt}" for attempt in attempts.split(" || "))
    return Evasion(name, f"{_HEAD}\n{before}\nwin(done({calls}))\n")


def _run(name: str, body: str) -> Evasion:
    """Wins where the body says so; mostly it should only fail to break anything."""
    return Evasion(name, f"{_HEAD}\n{body}\n")


EVASIONS: tuple[Evasion, ...] = (
    # ---- descriptors and sockets
    _try("send_descriptors", "socket.send_fds(pair[0], [b'x'], [0])", "pair = socket.socketpair()"),
    _try("send_many", "raw(307, pair[0].fileno(), bytes(64), 1, 0) >= 0", "pair = socket.socketpair()"),
    _try("datagram_to_a_path", "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) || socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)"),
    _try("send_to_an_address", "socket.socketpair()[0].sendto(b'x', '\\0volley') || socket.socketpair()[0].sendto(b'x', '/run/x')"),
    _try("move_a_pair", "socket.socketpair()[0].bind('\\0mine') || socket.socketpair()[0].bind('/tmp/s') || socket.socketpair()[0].connect('/run/docker.sock') is None || socket.socketpair()[0].listen(1) is None"),
    _try("other_descriptors", " || ".join(f"os.fstat({fd})" for fd in (3, 4, 5, 9, 255))),
    _try("forged_note", "os.write(3, b'Sforged')", "import atexit\natexit.register(os._exit, 125)"),
    _run("forged_setup_error", "os.dup2(1, 3)\nos.write(3, b'Sconfinement failed')\nos._exit(125)"),
    _try("seals_of_stdin", "os.write(os.open('/proc/self/fd/0', os.O_RDWR), b'7') || os.ftruncate(0, 1) is None || fcntl.fcntl(0, 1033, 15) >= 0"),
    _run("pipe_tricks", "fcntl.fcntl(1, fcntl.F_SETOWN, os.getpid())\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)\ntry: fcntl.fcntl(1, 1031, 4096)\nexcept OSError: pass\nwin(False)"),
    # ---- the first process of the namespace, which shares memory with the one outside
    _try("memory_of_the_first", "os.open('/proc/1/mem', 0) || os.listdir('/proc/1/fd') || open('/proc/1/maps').read(1) || open('/proc/1/environ').read(1) || os.readlink('/proc/1/exe')"),
    _try("trace_the_first", "raw(101, 0x4206, 1, 0, 0) >= 0 || raw(101, 16, 1, 0, 0) >= 0"),
    _try("handle_of_the_first", "raw(434, 1, 0) >= 0 || raw(438, 3, 0, 0) >= 0 || raw(424, os.open('/proc/1', os.O_DIRECTORY), 9, None, 0) >= 0"),
    _run("every_signal_to_the_first", "for s in range(1, 65):\n try: os.kill(1, s)\n except OSError: pass\n raw(234, 1, 1, s)\n raw(129, 1, s, bytes(128))\nwin(False)"),
    _run("every_signal_to_everybody", "for s in range(1, 65):\n signal.signal(s, signal.SIG_IGN) if s not in (9, 19, 32, 33) else None\nfor s in (1, 2, 15, 10, 12):\n try: os.kill(-1, s)\n except OSError: pass\n try: os.kill(0, s)\n except OSError: pass\nwin(False)"),
    _run("kill_my_group", "os.killpg(0, 9)"),
    _try("namespaces_of_the_first", "raw(308, os.open('/proc/1/ns/pid', 0), 0) == 0 || raw(308, os.open('/proc/self/ns/user', 0), 0) == 0 || raw(272, 0x80) == 0 || raw(272, 0x20000) == 0"),
    # ---- processes that nobody expects
    _run("brother", "for flags in (0x8000, 0x8000 | 17, 0x8000 | 0x4000):\n pid = raw(56, flags, 0, 0, 0, 0)\n if pid == 0: time.sleep(60)\n if pid > 0: win(True); break\nelse: win(False)"),
    _try("clone3", "raw(435, bytes(88), 88) >= 0 || raw(435, struct.pack('=QQQQQQQQ', 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64) >= 0"),
    _run("stopped", "os.kill(os.getpid(), signal.SIGSTOP)"),
    _run("stopped_children", "for _ in range(5): child(lambda: os.kill(os.getpid(), signal.SIGSTOP))\nwin(False)"),
    _run("vfork_without_end", "if raw(56, 0x4000 | 17, 0, 0, 0, 0) == 0: time.sleep(99)\ntime.sleep(99)"),
    _run("zombies", "for _ in range(15):\n pid = os.fork()\n if pid == 0: os._exit(0)\nwin(False)"),
    _run("daemons", "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nfor _ in range(10):\n if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n   time.sleep(0.2)\n   while True: os.write(1, b'7 ')\n  os._exit(0)\nwin(False)"),
    _run("last_words", "import atexit\ndef again():\n for _ in range(3):\n  if os.fork() == 0: again()\n time.sleep(9)\natexit.register(again)\nwin(False)"),
    _run("no_end", "import atexit\natexit.register(lambda: time.sleep(99))\nthreading.Thread(target=time.sleep, args=(99,)).start()\nwin(False)"),
    _run("a_name_that_looks_like_numbers", "def work():\n libc.prctl(15, b') R 1 1 1 0 -', 0, 0, 0)\n time.sleep(9)\nchild(work)\nwin(False)"),
    _run("not_dumpable", "libc.prctl(4, 0, 0, 0, 0)\nwhile True: pass"),
    _run("reaper", "libc.prctl(36, 1, 0, 0, 0)\nfor _ in range(5): child(lambda: child(lambda: time.sleep(99)))\nwin(False)"),
    # ---- files and mounts
    _try("devices", "os.open('/dev/ptmx', os.O_RDWR) || os.open('/dev/tty', os.O_RDWR) || os.open('/dev/console', os.O_RDWR) || os.openpty() || os.open('/dev/kvm', os.O_RDWR) || os.open('/dev/fuse', os.O_RDWR)"),
    _try("kernel_files", "open('/proc/kallsyms').read(1) || open('/proc/sys/kernel/ns_last_pid').read(1) || open('/proc/self/oom_score_adj', 'w').write('0') || open('/proc/self/uid_map', 'w').write('0 0 1') || open('/proc/self/mem', 'wb') || open('/proc/sysrq-trigger', 'w') || open('/proc/cpuinfo').read(1)"),
    _try("mount_calls", "raw(467, -100, b'/', 0, None, 0) >= 0 || raw(428, -100, b'/', 1) >= 0 || raw(457, bytes(32), bytes(512), 512, 0) >= 0 || raw(458, bytes(32), bytes(512), 64, 0) >= 0 || raw(430, b'tmpfs', 0) >= 0 || raw(155, b'/tmp', b'/tmp') == 0"),
    _try("owners_and_modes", "os.chmod(os.__file__, 0o777) is None || os.chown(os.__file__, os.getuid(), -1) is None || os.utime(os.__file__, (0, 0)) is None || os.truncate(os.__file__, 0) is None || os.link(os.__file__, '/tmp/os.py') is None || os.setxattr(os.__file__, 'user.x', b'1') is None"),
    _try("move_the_mounts", "os.rename('/tmp', '/tmp2') is None || os.rmdir('/tmp') is None || os.symlink('/etc', '/tmp2') is None || os.rename('/dev/shm', '/tmp/shm') is None"),
    _run("a_folder_for_the_program", "os.chdir('/')\ntry:\n os.unlink('/tmp/program.py')\n os.mkdir('/tmp/program.py')\n os.chmod('/tmp/program.py', 0)\n os.chmod('/tmp', 0)\nexcept OSError: pass\nwin(False)"),
    _run("deep_folders", "os.chdir('/tmp')\ntry:\n for _ in range(1000):\n  os.mkdir('d' * 50)\n  os.chdir('d' * 50)\nexcept OSError: pass\nwin(False)"),
    _run("a_pipe_nobody_opens", "os.mkfifo('/tmp/f')\nopen('/tmp/f').read()"),
    _try("out_through_a_folder", "os.open('../../etc/shadow', 0, dir_fd=os.open('/usr', os.O_PATH)) || os.open('/proc/self/root/etc/passwd', 0) || os.open('/proc/self/cwd/../etc/passwd', 0) || os.open('/usr/../etc/passwd', 0) || os.open('/proc/self/task/../../../etc/passwd', 0)"),
    # ---- what other slots can see
    _try("locks_on_shared_files", "fcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_SH) is None || fcntl.fcntl(os.open(os.__file__, 0), 1024, 0) >= 0 || fcntl.lockf(os.open(os.__file__, 0), fcntl.LOCK_EX | fcntl.LOCK_NB) is None"),
    _try("locks_of_others", "fcntl.fcntl(os.open(os.__file__, 0), 5, struct.pack('hhqqi4x', 1, 0, 42, 1, 0)) || fcntl.fcntl(os.open(os.__file__, 0), 36, struct.pack('hhqqi4x', 1, 0, 43, 1, 0))"),
    _try("what_is_cached", "raw(327, 0, None, 0, 0, 0, 8) >= 0 || os.preadv(os.open(os.__file__, 0), [bytearray(1)], 0, os.RWF_NOWAIT) >= 0 || os.posix_fadvise(os.open(os.__file__, 0), 0, 0, os.POSIX_FADV_DONTNEED) is None || raw(27, 0, 1, bytes(1)) == 0"),
    _try("watches_on_shared_folders", "raw(294, 0) >= 0 || raw(253) >= 0 || fcntl.fcntl(os.open('/usr/lib', 0), 1026, 1) >= 0 || raw(300, 0, 0) >= 0"),
    _try("shared_memory_of_the_kernel", "raw(29, 0x7777, 4096, 0o1600) >= 0 || raw(64, 0x7777, 1, 0o1600) >= 0 || raw(68, 0x7777, 0o1600) >= 0 || raw(240, b'q', 0o102, 0o600, None) >= 0 || raw(319, b'm', 0) >= 0 || raw(447, 0) >= 0"),
    _try("huge_pages_of_the_host", "mmap.mmap(-1, 2 << 20, flags=0x40022) || mmap.mmap(-1, 1 << 30, flags=0x40022 | 30 << 26) || raw(9, 0, 2 << 20, 3, 0x40022, -1, 0) > 0 and ctypes.get_errno() == 0"),
    _try("locked_memory", "libc.mlockall(3) == 0 || raw(149, id(0) & ~4095, 4096) == 0"),
    # ---- the filter
    _try("asynchronous_io", "raw(206, 8, ctypes.byref(ctypes.c_ulong())) == 0 || raw(425, 8, bytes(120)) >= 0"),
    _try("calls_of_tomorrow", "raw(470, 0, 0, 0) >= 0 || raw(511, 0, 0, 0) >= 0 || raw(600, 0, 0, 0) >= 0 || ctypes.get_errno() not in (0, 38, 1)"),
    _run("another_architecture", "code = mmap.mmap(-1, 4096, prot=7)\ncode.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')\nf = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))\nwin(f() > 0)"),
    _run("another_abi", "win(raw(0x40000000 | 39) > 0)"),
    _try("a_second_filter", "libc.prctl(22, 1, 0) == 0 and False || raw(317, 0, 0, 0) == 0 || raw(444, bytes(8), 8, 0) >= 0 || libc.prctl(38, 0, 0, 0, 0) == 0"),
    _try("limits_of_others", "raw(302, 1, 7, None, bytes(16)) == 0 || resource.setrlimit(resource.RLIMIT_CPU, (99, 99)) is None || resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999)) is None || resource.setrlimit(resource.RLIMIT_CORE, (9, 9)) is None"),
    _try("code_from_the_kernel", "raw(321, 0, bytes(120), 120) >= 0 || raw(323, 0) >= 0 || raw(298, bytes(112), 0, -1, -1, 0) >= 0 || raw(278, 1, bytes(16), 1, 0) >= 0 || raw(135, 0x0400000) == 0"),
    # ---- output
    _run("flood_by_splice", "z = os.open('/dev/zero', 0)\nwhile True: os.splice(z, 1, 1 << 16)"),
    _run("flood_by_sendfile", "z = os.open('/dev/zero', 0)\nwhile True: os.sendfile(1, z, None, 1 << 20)"),
    _run("flood_both", "while True:\n os.write(1, b'x' * 65536)\n os.write(2, b'x' * 65536)"),
    _run("odd_bytes", "os.write(1, b'\\x1b[2J\\xff\\xfe\\xed\\xa0\\x80\\r\\n' * 99)\nos.write(2, b'\\x00\\x1b]0;x\\x07' * 99)"),
    _run("output_and_closed_streams", "os.close(0)\nos.close(1)\nos.close(2)\nos._exit(0)"),
)  # fmt: skip
