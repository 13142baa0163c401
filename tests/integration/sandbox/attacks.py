# ruff: noqa: E501 - one program per line
"""The attack list: name -> (accepted statuses, program). Each is judged against ``EXPECTED`` for ``STDIN``."""

from dataclasses import dataclass

STDIN, EXPECTED = b"3 4\n", b"7\n"
SHORT = {
    "M": "memory_limit",
    "R": "runtime_error",
    "T": "timeout",
    "W": "wrong_answer",
    "O": "output_limit",
    "I": "infra_error",
    "P": "passed",
}


@dataclass(frozen=True)
class Attack:
    name: str
    accepted: frozenset[str]
    source: str


def _attack(name: str, accepted: str, source: str) -> Attack:
    return Attack(name, frozenset(SHORT[letter] for letter in accepted), source)


_LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
_RAISE = "if r != 0: raise OSError(ctypes.get_errno(), 'refused')\nprint(7, 'escaped')\n"


def _raw(number: int, arguments: str) -> str:
    return f"{_LIBC}r = libc.syscall({number}, {arguments})\nif r < 0: raise OSError('refused')\nprint('escaped', r)\n"


def _connect(host: str, port: int) -> str:
    return f"import socket\ns = socket.create_connection(({host!r}, {port}), 2)\nprint('connected')\n"


def _show(path: str) -> str:
    return f"print(open({path!r}).read())\n"


ATTACKS: tuple[Attack, ...] = (
    # ---- processes, memory, time
    _attack("fork_bomb", "MRTW", "import os\nwhile True: os.fork()\n"),
    _attack("fork_bomb_catch", "MRTW", "import os\nwhile True:\n try: os.fork()\n except OSError: pass\n"),
    _attack("thread_bomb", "MRTW", "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()\n"),
    _attack("mem_bomb_list", "M", "x = [0] * (1 << 33)\n"),
    _attack("mem_bomb_touch", "MT", "x = []\nfor _ in range(256): x.append(bytearray(b'x') * (16 << 20))\n"),
    _attack("mem_bomb_fork", "MRT", "import os, time\nfor _ in range(40):\n if os.fork() == 0:\n  x = bytearray(b'x') * (60 << 20)\n  time.sleep(60)\nos.wait()\nraise SystemExit(3)\n"),
    _attack("mmap_bomb", "MR", "import mmap\nx = [mmap.mmap(-1, 64 << 20) for _ in range(64)]\nfor m in x:\n for i in range(0, 64 << 20, 4096): m[i] = 1\n"),
    _attack("pipe_bomb", "MRTW", "import os, fcntl\nwhile True:\n r, w = os.pipe()\n fcntl.fcntl(w, 1031, 1 << 20)\n os.set_blocking(w, False)\n try: os.write(w, b'x' * (1 << 20))\n except BlockingIOError: pass\n"),
    _attack("cpu_spin", "T", "while True: pass\n"),
    _attack("cpu_spin_procs", "RT", "import os\nfor _ in range(3): os.fork()\nwhile True: pass\n"),
    _attack("sleep_forever", "T", "import time\ntime.sleep(1e6)\n"),
    _attack("read_stdin_block", "RTW", "import sys\nwhile True: sys.stdin.read()\n"),
    _attack("sigterm_ignore", "T", "import signal\nfor s in (15, 2, 24, 14): signal.signal(s, signal.SIG_IGN)\nwhile True: pass\n"),
    _attack("catch_timeout", "T", "while True:\n try:\n  while True: pass\n except BaseException: pass\n"),
    _attack("huge_int", "MRT", "print(len(str((9 ** 9 ** 9) % 10)))\n"),
    _attack("huge_int_str", "MRT", "import sys\nsys.set_int_max_str_digits(0)\nprint(len(str(7 ** (1 << 27))))\n"),
    _attack("compile_bomb", "MRT", "compile('(' * 90 + ')' * 90, 'x', 'eval')\ncompile('+'.join(['a' * 9] * 3_000_000), 'x', 'eval')\nwhile True: pass\n"),
    _attack("regex_catastrophe", "T", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')\n"),
    _attack("zip_bomb", "MRT", "import zlib\nx = zlib.compress(bytes(1 << 24))\nd = [zlib.decompress(x) for _ in range(1000)]\n"),
    _attack("deep_recursion", "MR", "import sys\nsys.setrecursionlimit(1 << 30)\nclass A:\n def __getattr__(self, n): return getattr(self, n + '')\nA().x\n"),
    _attack("sig_segv", "R", "import ctypes\nctypes.string_at(0)\n"),
    _attack("core_dump", "R", "import os\nos.abort()\n"),
    _attack("raise_limits", "MRTW", "import resource\nfor k in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE): resource.setrlimit(k, (-1, -1))\nx = bytearray(b'x') * (4 << 30)\n"),
    # ---- output, disk, files
    _attack("stdout_flood", "O", "while True: print('x' * 4096)\n"),
    _attack("stderr_flood", "ORT", "import sys\nwhile True: print('x' * 4096, file=sys.stderr)\n"),
    _attack("stdout_flood_child", "OTW", "import os\nif os.fork() == 0:\n while True: os.write(1, b'x' * 4096)\n"),
    _attack("stdout_100mb", "O", "import sys\nsys.stdout.write('x' * (100 << 20))\n"),
    _attack("disk_fill", "MOR", "f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(1 << 20))\n"),
    _attack("disk_fill_many", "MRW", "for i in range(1000):\n with open(f'/tmp/{i}', 'wb') as f: f.write(bytes(1 << 20))\n"),
    _attack("inode_fill", "MRT", "i = 0\nwhile True:\n open(f'/tmp/{i}', 'w').close()\n i += 1\n"),
    _attack("shm_fill", "MOR", "f = open('/dev/shm/x', 'wb')\nwhile True: f.write(bytes(1 << 20))\n"),
    _attack("posix_shm", "MOR", "from multiprocessing import shared_memory\ns = shared_memory.SharedMemory(create=True, size=4 << 30)\nfor i in range(0, 4 << 30, 4096): s.buf[i] = 1\n"),
    _attack("sparse_file", "OR", "f = open('/tmp/x', 'wb')\nf.truncate(1 << 40)\n"),
    _attack("fd_exhaust", "R", "import os\nwhile True: os.open('/dev/null', os.O_RDONLY)\n"),
    _attack("write_root", "R", "open('/pwned', 'w').write('x')\n"),
    _attack("write_usr", "R", "import os\nopen(os.__file__, 'a').write('x')\n"),
    _attack("write_code", "RW", "open('/zygote.py', 'w').write('x')\n"),
    _attack("read_passwd", "RW", _show("/etc/passwd")),
    _attack("read_shadow", "RW", _show("/etc/shadow")),
    _attack("read_answers", "RW", "import os\nfor d in ('/work', '/root', '/home', '/var', '/srv'):\n for r, _, f in os.walk(d): print(r, f)\n"),
    _attack("ls_host", "RW", "import os\nprint(os.listdir('/'), os.listdir('/root'))\n"),
    _attack("symlink_trick", "RW", "import os\nos.symlink('/etc/shadow', '/tmp/s')\nprint(open('/tmp/s').read())\n"),
    _attack("dotdot_fd", "RW", "import os\nfor fd in range(64):\n try: print(os.listdir(fd)); print(os.open('../../../../etc/shadow', os.O_RDONLY, dir_fd=fd))\n except OSError: pass\n"),
    _attack("proc_root", "RW", "import os\nfor p in os.listdir('/proc'):\n for n in ('environ', 'root/etc/shadow', 'cwd'):\n  try: print(open(f'/proc/{p}/{n}').read()[:99])\n  except OSError: pass\n"),
    _attack("dev_access", "RW", "for d in ('sda', 'vda', 'nvme0n1', 'kvm', 'mem', 'kmsg', 'fuse'):\n try: print(open('/dev/' + d, 'rb').read(9))\n except OSError: pass\n"),
    _attack("mknod_disk", "RW", "import os, stat\nos.mknod('/tmp/d', 0o600 | stat.S_IFBLK, os.makedev(254, 0))\nprint(open('/tmp/d', 'rb').read(9))\n"),
    # ---- privileges and neighbours
    _attack("suid", "RW", "import os, subprocess\nprint(subprocess.run(['/usr/bin/su', '-c', 'id'], capture_output=True).stdout)\nos.setuid(0)\n"),
    _attack("env_leak", "W", "import os\nprint([v for k, v in os.environ.items() if 'TOKEN' in k or 'SECRET' in k or 'CANARY' in k])\n"),
    _attack("fd_leak", "W", "import os\nfor fd in range(3, 64):\n try: print(os.readlink(f'/proc/self/fd/{fd}'), os.read(fd, 99))\n except OSError: pass\n"),
    _attack("stdin_reopen", "RW", "import os\nf = os.open('/proc/self/fd/0', os.O_RDWR)\nos.write(f, b'0 7')\n"),
    _attack("frames_gc", "W", "import gc, sys\nf = sys._getframe()\nseen = []\nwhile f: seen.append(str(f.f_locals)); f = f.f_back\nfound = [o for o in gc.get_objects() if isinstance(o, bytes) and o.strip() == b'7']\nprint('found' if found or any(\"b'7\" in s for s in seen) else 'nothing')\n"),
    _attack("core_pattern", "RW", "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')\n"),
    _attack("cgroup_escape", "RW", "open('/sys/fs/cgroup/memory/release_agent', 'w').write('/tmp/x')\n"),
    _attack("kill_all", "RITW", "import os\nos.kill(-1, 9)\n"),
    _attack("kill_parent", "RITW", "import os\nos.kill(os.getppid(), 9)\nos.kill(1, 9)\n"),
    _attack("ptrace_parent", "RW", _LIBC + "r = libc.ptrace(16, os.getppid(), 0, 0)\n" + _RAISE),
    _attack("daemon", "W", "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  for fd in (0, 1, 2): os.close(fd)\n  time.sleep(600)\n os._exit(0)\nos.wait()\nprint('left')\n"),
    _attack("daemon_hold_stdout", "OTW", "import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(600)\nprint('left')\n"),
    _attack("exec_shell", "RW", "import os\nos.execv('/bin/sh', ['sh', '-c', 'id; ls /'])\n"),
    _attack("setpriority_rt", "RW", "import os\nos.nice(-20)\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))\n"),
    # ---- network and kernel
    _attack("net_connect", "RW", _connect("127.0.0.1", 22)),
    _attack("net_internet", "RTW", _connect("1.1.1.1", 443)),
    _attack("net_metadata", "RTW", _connect("169.254.169.254", 80)),
    _attack("net_dns", "RTW", "import socket\nprint(socket.gethostbyname('secret.example.com'))\n"),
    _attack("net_listen", "RTW", "import socket\ns = socket.socket()\ns.bind(('0.0.0.0', 8000))\ns.listen()\nprint('listening')\n"),
    _attack("net_vsock", "RW", "import socket\ns = socket.socket(40, 1)\ns.connect((2, 1))\nprint('connected')\n"),
    _attack("unshare_inside", "RW", _LIBC + "r = libc.unshare(0x10000000)\n" + _RAISE),
    _attack("clone_newuser", "RW", _raw(56, "0x10000000 | 17, 0, 0, 0, 0")),
    _attack("mount_inside", "RW", _LIBC + "r = libc.mount(b't', b'/tmp', b'tmpfs', 0, None)\n" + _RAISE),
    _attack("umount_inside", "RW", _LIBC + "r = libc.umount2(b'/tmp', 2)\n" + _RAISE),
    _attack("io_uring", "RW", _raw(425, "8, bytes(120)")),
    _attack("bpf", "RW", _raw(321, "0, bytes(72), 72")),
    _attack("keyctl", "RW", _raw(250, "0, -3, 1")),
    _attack("perf_event", "RW", _raw(298, "bytes(112), 0, -1, -1, 0")),
    # ---- lies
    _attack("exit0_early", "W", "import os\nos._exit(0)\n"),
    _attack("sys_exit0", "W", "import sys\nsys.exit(0)\n"),
    _attack("fake_verdict", "W", "print('{\"status\": \"passed\", \"reward\": 1.0}')\n"),
    _attack("fake_reply_fd", "RW", "import os\nfor fd in range(64):\n for i in range(9):\n  try: os.write(fd, b'{\"id\": %d, \"exit\": 0}' % i)\n  except OSError: pass\n"),
    _attack("hardcode_sample", "W", "print(8)\n"),
    _attack("nul_bytes", "W", "print('7\\0')\n"),
    _attack("many_answers", "W", "for i in range(100): print(i)\n"),
    _attack("monkeypatch", "W", "import builtins, json, sys, io\nclass E(str):\n def __eq__(self, o): return True\n __hash__ = str.__hash__\nbuiltins.str = E\njson.loads = lambda *a: {'status': 'passed'}\nsys.stdout.write(E('x'))\nbuiltins.open = None\n"),
    _attack("state_between", "W", "import os\nfresh = not os.path.exists('/tmp/seen') and not os.path.exists('/dev/shm/seen')\nfor p in ('/tmp/seen', '/dev/shm/seen'): open(p, 'w').close()\nprint('fresh' if fresh else sum(map(int, input().split())))\n"),
)  # fmt: skip

CONTROLS: tuple[Attack, ...] = (
    _attack("correct", "P", "print(sum(map(int, input().split())))\n"),
    _attack("correct_threads", "P", "import sys, threading\nsys.setrecursionlimit(1 << 20)\nthreading.stack_size(64 << 20)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\ndef main():\n f(50000)\n print(sum(map(int, input().split())))\nt = threading.Thread(target=main)\nt.start()\nt.join()\n"),
    _attack("correct_input", "P", "import os\na = input().split()\nb = os.read(0, 9)\nprint(int(a[0]) + int(a[1]))\n"),
    _attack("correct_main", "P", "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n x: int\nif __name__ == '__main__':\n v = [pickle.loads(pickle.dumps(P(int(w)))).x for w in input().split()]\n print(sum(v))\n"),
    _attack("correct_subproc", "P", "import subprocess, sys\nout = subprocess.run([sys.executable, '-c', 'print(3+4)'], capture_output=True, text=True)\nprint(out.stdout.strip())\n"),
)  # fmt: skip
NEEDS_PROCESSES = frozenset({"correct_subproc"})  # programs that need what tier C does not offer by design
