# ruff: noqa: E501 - one program per line
"""Ways honest programs read, write and work: name -> (program, standard input, expected output)."""

_TWO = b"3 4\n5 6\n"
_SUM = b"18\n"


def _reads(expression: str, before: str = "") -> tuple[str, bytes, bytes]:
    return f"{before}\nprint(sum(map(int, ({expression}))))\n", _TWO, _SUM


def _writes(statement: str) -> tuple[str, bytes, bytes]:
    return statement, b"", b"hello 7\n"


IDIOMS: dict[str, tuple[str, bytes, bytes]] = {
    # reading
    "input": _reads("input().split() + input().split()"),
    "stdin_read": _reads("sys.stdin.read().split()", "import sys"),
    "stdin_readline": _reads("sys.stdin.readline().split() + sys.stdin.readline().split()", "import sys"),
    "stdin_readlines": _reads("' '.join(sys.stdin.readlines()).split()", "import sys"),
    "stdin_iterate": _reads("[w for line in sys.stdin for w in line.split()]", "import sys"),
    "stdin_buffer": _reads("sys.stdin.buffer.read().split()", "import sys"),
    "open_0": _reads("open(0).read().split()"),
    "dev_stdin": _reads("open('/dev/stdin').read().split()"),
    "os_read": _reads("os.read(0, 1 << 16).split()", "import os"),
    "fileinput": _reads("' '.join(fileinput.input()).split()", "import fileinput"),
    "iter_readline": (
        "import sys\nprint(sum(int(w) for line in iter(sys.stdin.readline, '') for w in line.split()))\n", _TWO, _SUM,
    ),
    "eof_error": (
        "t = 0\ntry:\n while True: t += sum(map(int, input().split()))\nexcept EOFError: print(t)\n", _TWO, _SUM,
    ),
    "mmap_stdin": _reads("mmap.mmap(0, 0, prot=mmap.PROT_READ).read().split()", "import mmap"),
    "bytesio": _reads("io.BytesIO(os.read(0, os.fstat(0).st_size)).read().split()", "import io, os"),
    # writing
    "print": _writes("print('hello', 7)"),
    "stdout_write": _writes("import sys\nsys.stdout.write('hello 7\\n')"),
    "stdout_buffer": _writes("import sys\nsys.stdout.buffer.write(b'hello 7\\n')"),
    "os_write": _writes("import os\nos.write(1, b'hello 7\\n')"),
    "open_1": _writes("open(1, 'w').write('hello 7\\n')"),
    "dev_stdout": _writes("open('/dev/stdout', 'w').write('hello 7\\n')"),
    "redirect": _writes("import contextlib, io, sys\nb = io.StringIO()\nwith contextlib.redirect_stdout(b): print('hello', 7)\nsys.stdout.write(b.getvalue())"),
    "atexit": _writes("import atexit\natexit.register(print, 'hello 7')"),
    "exit_0": _writes("print('hello 7')\nexit()"),
    "sys_exit": _writes("import sys\nprint('hello 7')\nsys.exit()"),
    "900_kb": ("print('x ' * 450_000)", b"", b"x " * 450_000),
    # working
    "threads": _writes("import threading\nt = threading.Thread(target=print, args=('hello', 7))\nt.start()"),
    "thread_pool": _writes("from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as p: print('hello', sum(p.map(int, '1231')))"),
    "asyncio": _writes("import asyncio\nasync def f():\n await asyncio.sleep(0.01)\n print('hello', 7)\nasyncio.run(f())"),
    "multiprocessing": _writes("from multiprocessing import Pool\ndef f(x): return x * 2 - x\nif __name__ == '__main__':\n with Pool(2) as p: print('hello', sum(p.map(f, [1, 2, 4])))"),
    "subprocess": _writes("import subprocess\nprint('hello', subprocess.run(['/bin/echo', '7'], capture_output=True, text=True).stdout)"),
    "sqlite": _writes("import sqlite3\nc = sqlite3.connect('/tmp/d.db')\nc.execute('create table t (x)')\nc.execute('insert into t values (7)')\nprint('hello', c.execute('select x from t').fetchone()[0])"),
    "tempfile": _writes("import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n f.write('7')\n f.seek(0)\n print('hello', f.read())"),
    "recursion": _writes("import sys\nsys.setrecursionlimit(300_000)\ndef f(n): return 7 if n == 0 else f(n - 1)\nprint('hello', f(200_000))"),
    "dataclass_pickle": _writes("import dataclasses, pickle\n@dataclasses.dataclass\nclass A: x: int\nprint('hello', pickle.loads(pickle.dumps(A(7))).x)"),
    "own_source": _writes("print('hello', 7 if 'own' in open(__file__).read() else 8)  # own"),
    "hash_is_fixed": ("print(hash('volley') == __import__('functools').reduce(lambda a, _: a, [hash('volley')]))", b"", b"True\n"),
    "signal_alarm": _writes("import signal\ndef h(*a): raise TimeoutError\nsignal.signal(signal.SIGALRM, h)\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\ntry:\n while True: sum(range(999))\nexcept TimeoutError: print('hello 7')"),
    "decimal_fraction": _writes("from decimal import Decimal\nfrom fractions import Fraction\nprint('hello', int(Decimal('3.5') + Decimal(Fraction(7, 2).numerator) / 2))"),
}  # fmt: skip
