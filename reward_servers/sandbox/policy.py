"""The whole policy of the sandbox: system calls, mounts, paths, environment. Limits live in ``volley.scoring``.

Model-written code may compute, read its standard input, the interpreter and its libraries, write its standard output
and two small in-memory file systems, start threads and a bounded number of child processes. Everything else is denied.
Each denial is made by two layers where two exist, so that one mistake in this file is not an escape.
"""

# -------------------------------------------------------------------------------- system calls, tier A, B
# Denied with EPERM inside namespaces: what namespaces do not cover, what widens the kernel's attack surface, what
# could outlive a test or reach its neighbours. The program sees a PermissionError.
DENIED_SYSCALLS: tuple[str, ...] = (
    # not covered by namespaces: a ring bypasses seccomp for the calls it makes, a keyring outlives the process
    "io_uring_setup", "io_uring_enter", "io_uring_register", "add_key", "request_key", "keyctl",
    # look into or steer another process
    "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "process_madvise", "pidfd_open",
    # kernel programs, tracing, faults served by user space: the usual ingredients of kernel exploits
    "bpf", "perf_event_open", "userfaultfd", "memfd_secret", "lookup_dcookie", "syslog",
    # mounts and namespaces
    "mount", "umount2", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
    "pivot_root", "chroot", "setns", "unshare", "open_by_handle_at", "name_to_handle_at", "quotactl", "fanotify_init",
    # the machine
    "reboot", "swapon", "swapoff", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module",
    "iopl", "ioperm", "acct", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "sethostname",
    "setdomainname", "vhangup", "modify_ldt", "personality", "nfsservctl",
    # devices and memory placement
    "mknod", "mknodat", "mbind", "set_mempolicy", "get_mempolicy", "migrate_pages", "move_pages", "memfd_create",
    # priorities of other processes, and of this one
    "sched_setscheduler", "sched_setparam", "sched_setattr", "ioprio_set", "setpriority",
    # kernel objects that would carry state from one test of a program to the next
    "shmget", "shmat", "semget", "semop", "semtimedop", "msgget", "msgsnd", "mq_open",
    # the network: AF_VSOCK and others have no namespace; pairs of local sockets stay (asyncio needs them)
    "socket",
    # a program must not relax or stack its own confinement
    "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "seccomp",
)  # fmt: skip

# -------------------------------------------------------------------------------- system calls, tier C
# Without namespaces only these are allowed: no new process, no writable path, no signal to anyone else.
ALLOWED_SYSCALLS: tuple[str, ...] = (
    "read", "write", "readv", "writev", "pread64", "pwrite64", "close", "close_range", "fstat", "stat", "lstat",
    "newfstatat", "statx", "lseek", "mmap", "munmap", "mprotect", "mremap", "brk", "madvise", "rt_sigaction",
    "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "ioctl", "access", "faccessat", "faccessat2", "openat", "open",
    "readlink", "readlinkat", "getcwd", "getdents64", "fcntl", "dup", "dup2", "dup3", "getpid", "gettid", "getuid",
    "geteuid", "getgid", "getegid", "getppid", "getpgrp", "getpgid", "getsid", "getrandom", "clock_gettime",
    "clock_getres", "clock_nanosleep", "nanosleep", "gettimeofday", "time", "times", "futex", "set_robust_list",
    "get_robust_list", "set_tid_address", "rseq", "arch_prctl", "getrlimit", "getrusage", "sysinfo",
    "uname", "exit", "exit_group", "poll", "ppoll", "select", "pselect6", "epoll_create1", "epoll_ctl", "epoll_wait",
    "epoll_pwait", "eventfd2", "pipe", "pipe2", "sched_yield", "sched_getaffinity", "restart_syscall", "tgkill",
    "umask", "fadvise64", "alarm", "setitimer", "getitimer", "membarrier", "wait4", "waitid", "chdir", "sendto",
    "recvfrom", "sendmsg", "recvmsg", "shutdown",
)  # fmt: skip

NAMESPACE_FLAGS = 0x7E020000  # every CLONE_NEW* bit: a child process may be made, a namespace may not
CLONE_THREAD = 0x00010000
AF_UNIX = 1
FORBIDDEN_IOCTLS = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX type into somebody's terminal

# -------------------------------------------------------------------------------- mounts and environment
TMP, SHM = "/tmp", "/dev/shm"  # inside: fresh and in memory for every test
SCRATCH_BYTES, SCRATCH_INODES = 16 << 20, 1024
SITE = "/site"  # the packages that programs may import beside the standard library
INNER = "/zygote.py"
SYSTEM_DIRS = ("/usr",)
SYSTEM_LINKS = (("usr/lib", "/lib"), ("usr/lib64", "/lib64"), ("usr/bin", "/bin"), ("usr/sbin", "/sbin"))
NOBODY = "65534"

ENVIRONMENT: dict[str, str] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": TMP,
    "TMPDIR": TMP,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

# What contest programs import; already there when a program starts.
PRELOAD = (
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "io", "itertools",
    "json", "math", "operator", "random", "re", "statistics", "string", "sys", "threading", "typing",
)  # fmt: skip

# Landlock: nothing that is not listed can be opened, whatever is mounted.
READABLE = (*SYSTEM_DIRS, SITE, "/proc", "/dev/urandom", "/dev/random", "/dev/zero")
WRITABLE = (TMP, SHM, "/dev/null", "/dev/full")
READABLE_STRICT = (*SYSTEM_DIRS, "/lib", "/lib64", "/dev/urandom", "/dev/null", "/dev/zero")

# -------------------------------------------------------------------------------- accounts
# Each slot of a worker started by root runs as one of these: `accounts` claims one that no other slot of this host's
# network namespace holds, and that is nobody's in its user database (Debian gives a few of them to packages).
SLOT_UIDS = range(64_000, 65_000)


def bubblewrap_mounts() -> list[str]:
    """What a program sees of the file system, as arguments of bubblewrap; the last step takes away writing."""
    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    arguments += ["--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    for target, link in SYSTEM_LINKS:
        arguments += ["--symlink", target, link]
    scratch = [word for path in (TMP, SHM) for word in ("--size", str(SCRATCH_BYTES), "--tmpfs", path)]
    return [*arguments, "--proc", "/proc", "--dev", "/dev", *scratch]
