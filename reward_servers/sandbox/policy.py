"""The complete policy of the sandbox: system calls, mounts, paths, environment. Limits are in ``volley.scoring``.

Model-written code may compute, read its standard input, the interpreter and its libraries, write to its standard
output and two small in-memory file systems, and start threads and a bounded number of child processes. Everything else
is denied, by two layers where possible, so that one mistake in this file does not allow an escape.
"""

# -------------------------------------------------------------------------------- system calls, tier A, B
# Denied with EPERM inside namespaces: calls that namespaces do not cover, that widen the kernel's attack surface, or
# whose effects could outlive a test or reach its neighbours. The program gets a PermissionError.
DENIED_SYSCALLS: tuple[str, ...] = (
    # not covered by namespaces: a ring bypasses seccomp for the calls it makes, a keyring outlives the process
    "io_uring_setup", "io_uring_enter", "io_uring_register", "io_setup", "add_key", "request_key", "keyctl",
    # inspect or control another process
    "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "process_madvise", "process_mrelease",
    "pidfd_open", "pidfd_send_signal",
    # kernel programs, tracing, page faults handled in user space: common ingredients of kernel exploits
    "bpf", "perf_event_open", "userfaultfd", "memfd_secret", "lookup_dcookie", "syslog",
    "vmsplice", "uselib", "lsm_set_self_attr",
    # mounts and namespaces
    "mount", "umount2", "move_mount", "open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
    "open_tree_attr", "statmount", "listmount",
    "pivot_root", "chroot", "setns", "unshare", "open_by_handle_at", "name_to_handle_at", "quotactl", "quotactl_fd",
    "fanotify_init",
    # the machine
    "reboot", "swapon", "swapoff", "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module",
    "iopl", "ioperm", "acct", "settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "sethostname",
    "setdomainname", "vhangup", "modify_ldt", "personality", "nfsservctl",
    # devices and memory placement
    "mknod", "mknodat", "mbind", "set_mempolicy", "get_mempolicy", "migrate_pages", "move_pages", "memfd_create",
    "set_mempolicy_home_node",
    # priorities of other processes, and of this one
    "sched_setscheduler", "sched_setparam", "sched_setattr", "ioprio_set", "setpriority",
    # kernel objects that would carry state from one test to the next
    "shmget", "shmat", "semget", "semop", "semtimedop", "msgget", "msgsnd", "mq_open",
    # the files of /usr are shared with other slots: locks, access notifications and what is cached of them could
    # carry messages
    "flock", "inotify_init", "inotify_init1", "inotify_add_watch", "cachestat", "mincore", "fadvise64",
    # the network: some families, such as AF_VSOCK, have no namespace; socketpair stays allowed for asyncio
    "socket", "connect", "bind", "listen", "accept", "accept4",
    # file descriptors in flight outlive their test if two sockets carry each other
    "sendmsg", "sendmmsg",
    # a program must not change its own confinement
    "landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self", "seccomp",
)  # fmt: skip

# -------------------------------------------------------------------------------- system calls, tier C
# Without namespaces, only these are allowed: no new processes, no writable paths, no signals to other processes.
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
    "umask", "alarm", "setitimer", "getitimer", "membarrier", "wait4", "waitid", "chdir", "recvfrom",
    "recvmsg", "shutdown",
)  # fmt: skip

NAMESPACE_FLAGS = 0x7E020000  # all CLONE_NEW* bits: a program may create processes but not namespaces
CLONE_PARENT = 0x00008000  # would make the child a sibling of the program, which the sandbox does not expect
CLONE_THREAD = 0x00010000
AF_UNIX = 1
MAP_HUGETLB = 0x40000  # pages of a pool that belongs to the whole host
SOCK_STREAM, SOCK_TYPE_MASK = 1, 0xF
FORBIDDEN_IOCTLS = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX can inject input into a terminal
# F_GETLK and F_OFD_GETLK reveal who holds a lock on a shared file, F_SETLEASE and F_NOTIFY who opens it.
FORBIDDEN_FCNTLS = (5, 36, 1024, 1026)
FIRST_UNKNOWN_SYSCALL = 470  # newer than this policy: denied in every tier

# -------------------------------------------------------------------------------- mounts and environment
TMP, SHM = "/tmp", "/dev/shm"  # in the sandbox: in memory, new for every test
SCRATCH_BYTES, SCRATCH_INODES = 16 << 20, 1024
SITE = "/site"  # the packages that programs may import besides the standard library
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

# Modules that contest programs commonly import; loaded before a program starts.
PRELOAD = (
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "io", "itertools",
    "json", "math", "operator", "random", "re", "statistics", "string", "sys", "threading", "typing",
)  # fmt: skip

# Landlock: only these paths can be opened, whatever else is mounted.
READABLE = (*SYSTEM_DIRS, SITE, "/proc", "/dev/urandom", "/dev/random", "/dev/zero")
WRITABLE = (TMP, SHM, "/dev/null", "/dev/full")
READABLE_STRICT = (*SYSTEM_DIRS, "/lib", "/lib64", "/dev/urandom", "/dev/null", "/dev/zero")

# Packages of the interpreters below the readable folders: hidden, except those that the job requests.
PACKAGE_FOLDERS = ("lib*/python3*/site-packages", "lib*/python3*/dist-packages", "local/lib/python3*/*-packages")

# -------------------------------------------------------------------------------- accounts
# If the worker runs as root, each slot runs as one of these: `accounts` claims one that no other slot in the host's
# network namespace uses and that has no entry in the user database (Debian assigns a few of them to packages).
SLOT_UIDS = range(64_000, 65_000)


def bubblewrap_mounts() -> list[str]:
    """Return bubblewrap's arguments for namespaces, environment and basic mounts, which the caller makes read-only."""
    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    arguments += ["--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        arguments += ["--setenv", name, value]
    for target, link in SYSTEM_LINKS:
        arguments += ["--symlink", target, link]
    scratch = [word for path in (TMP, SHM) for word in ("--size", str(SCRATCH_BYTES), "--tmpfs", path)]
    return [*arguments, "--proc", "/proc", "--dev", "/dev", *scratch]
