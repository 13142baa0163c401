"""Numbers of the system calls in the policy, from the kernel's tables. Calls that an architecture lacks are omitted."""

import platform

from volley.errors import HostError

_X86_64: dict[str, int] = {
    "accept": 43, "accept4": 288, "access": 21, "acct": 163, "add_key": 248, "adjtimex": 159, "alarm": 37,
    "arch_prctl": 158, "bind": 49, "bpf": 321, "brk": 12, "cachestat": 451, "capset": 126, "chdir": 80, "chroot": 161,
    "clock_adjtime": 305, "clock_getres": 229, "clock_gettime": 228, "clock_nanosleep": 230, "clock_settime": 227,
    "clone": 56, "clone3": 435, "close": 3, "close_range": 436, "connect": 42, "delete_module": 176, "dup": 32,
    "dup2": 33, "dup3": 292, "epoll_create1": 291, "epoll_ctl": 233, "epoll_pwait": 281, "epoll_wait": 232,
    "eventfd2": 290, "exit": 60, "exit_group": 231, "faccessat": 269, "faccessat2": 439, "fadvise64": 221,
    "fanotify_init": 300, "fcntl": 72, "finit_module": 313, "flock": 73, "fsconfig": 431, "fsmount": 432,
    "fsopen": 430, "fspick": 433, "fstat": 5, "futex": 202, "get_mempolicy": 239, "get_robust_list": 274, "getcwd": 79,
    "getdents64": 217, "getegid": 108, "geteuid": 107, "getgid": 104, "getitimer": 36, "getpgid": 121, "getpgrp": 111,
    "getpid": 39, "getppid": 110, "getrandom": 318, "getrlimit": 97, "getrusage": 98, "getsid": 124, "gettid": 186,
    "gettimeofday": 96, "getuid": 102, "init_module": 175, "inotify_add_watch": 254, "inotify_init": 253,
    "inotify_init1": 294, "io_setup": 206, "io_uring_enter": 426, "io_uring_register": 427, "io_uring_setup": 425,
    "ioctl": 16, "ioperm": 173, "iopl": 172, "ioprio_set": 251, "kcmp": 312, "kexec_file_load": 320, "kexec_load": 246,
    "keyctl": 250, "landlock_add_rule": 445, "landlock_create_ruleset": 444, "landlock_restrict_self": 446,
    "listen": 50, "listmount": 458, "lookup_dcookie": 212, "lseek": 8, "lsm_set_self_attr": 460, "lstat": 6,
    "madvise": 28, "mbind": 237, "membarrier": 324, "memfd_create": 319, "memfd_secret": 447, "migrate_pages": 256,
    "mincore": 27, "mknod": 133, "mknodat": 259, "mmap": 9, "modify_ldt": 154, "mount": 165, "mount_setattr": 442,
    "move_mount": 429, "move_pages": 279, "mprotect": 10, "mq_open": 240, "mremap": 25, "msgget": 68, "msgsnd": 69,
    "munmap": 11, "name_to_handle_at": 303, "nanosleep": 35, "newfstatat": 262, "nfsservctl": 180, "open": 2,
    "open_by_handle_at": 304, "open_tree": 428, "open_tree_attr": 467, "openat": 257, "perf_event_open": 298,
    "personality": 135, "pidfd_getfd": 438, "pidfd_open": 434, "pidfd_send_signal": 424, "pipe": 22, "pipe2": 293,
    "pivot_root": 155, "poll": 7, "ppoll": 271, "pread64": 17, "preadv2": 327, "prlimit64": 302, "process_madvise": 440,
    "process_mrelease": 448, "process_vm_readv": 310, "process_vm_writev": 311, "pselect6": 270, "ptrace": 101,
    "pwrite64": 18, "quotactl": 179, "quotactl_fd": 443, "read": 0, "readlink": 89, "readlinkat": 267, "readv": 19,
    "reboot": 169, "recvfrom": 45, "recvmsg": 47, "request_key": 249, "restart_syscall": 219, "rseq": 334,
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_getaffinity": 204, "sched_setattr": 314,
    "sched_setparam": 142, "sched_setscheduler": 144, "sched_yield": 24, "seccomp": 317, "select": 23, "semget": 64,
    "semop": 65, "semtimedop": 220, "sendmmsg": 307, "sendmsg": 46, "sendto": 44, "set_mempolicy": 238,
    "set_mempolicy_home_node": 450, "set_robust_list": 273, "set_tid_address": 218, "setdomainname": 171,
    "sethostname": 170, "setitimer": 38, "setns": 308, "setpriority": 141, "settimeofday": 164, "shmat": 30,
    "shmget": 29, "shutdown": 48, "sigaltstack": 131, "socket": 41, "socketpair": 53, "stat": 4, "statmount": 457,
    "statx": 332, "swapoff": 168, "swapon": 167, "sysinfo": 99, "syslog": 103, "tgkill": 234, "time": 201,
    "times": 100, "umask": 95, "umount2": 166, "uname": 63, "unshare": 272, "uselib": 134, "userfaultfd": 323,
    "vhangup": 153, "vmsplice": 278, "wait4": 61, "waitid": 247, "write": 1, "writev": 20,
}  # fmt: skip

_AARCH64: dict[str, int] = {
    "accept": 202, "accept4": 242, "acct": 89, "add_key": 217, "adjtimex": 171, "bind": 200, "bpf": 280, "brk": 214,
    "cachestat": 451, "capset": 91, "chdir": 49, "chroot": 51, "clock_adjtime": 266, "clock_getres": 114,
    "clock_gettime": 113, "clock_nanosleep": 115, "clock_settime": 112, "clone": 220, "clone3": 435, "close": 57,
    "close_range": 436, "connect": 203, "delete_module": 106, "dup": 23, "dup3": 24, "epoll_create1": 20,
    "epoll_ctl": 21, "epoll_pwait": 22, "eventfd2": 19, "exit": 93, "exit_group": 94, "faccessat": 48,
    "faccessat2": 439, "fadvise64": 223, "fanotify_init": 262, "fcntl": 25, "finit_module": 273, "flock": 32,
    "fsconfig": 431, "fsmount": 432, "fsopen": 430, "fspick": 433, "fstat": 80, "futex": 98, "get_mempolicy": 236,
    "get_robust_list": 100, "getcwd": 17, "getdents64": 61, "getegid": 177, "geteuid": 175, "getgid": 176,
    "getitimer": 102, "getpgid": 155, "getpid": 172, "getppid": 173, "getrandom": 278, "getrlimit": 163,
    "getrusage": 165, "getsid": 156, "gettid": 178, "gettimeofday": 169, "getuid": 174, "init_module": 105,
    "inotify_add_watch": 27, "inotify_init1": 26, "io_setup": 0, "io_uring_enter": 426, "io_uring_register": 427,
    "io_uring_setup": 425, "ioctl": 29, "ioprio_set": 30, "kcmp": 272, "kexec_file_load": 294, "kexec_load": 104,
    "keyctl": 219, "landlock_add_rule": 445, "landlock_create_ruleset": 444, "landlock_restrict_self": 446,
    "listen": 201, "listmount": 458, "lookup_dcookie": 18, "lseek": 62, "lsm_set_self_attr": 460, "madvise": 233,
    "mbind": 235, "membarrier": 283, "memfd_create": 279, "memfd_secret": 447, "migrate_pages": 238, "mincore": 232,
    "mknodat": 33, "mmap": 222, "mount": 40, "mount_setattr": 442, "move_mount": 429, "move_pages": 239,
    "mprotect": 226, "mq_open": 180, "mremap": 216, "msgget": 186, "msgsnd": 189, "munmap": 215,
    "name_to_handle_at": 264, "nanosleep": 101, "newfstatat": 79, "nfsservctl": 42, "open_by_handle_at": 265,
    "open_tree": 428, "open_tree_attr": 467, "openat": 56, "perf_event_open": 241, "personality": 92,
    "pidfd_getfd": 438, "pidfd_open": 434, "pidfd_send_signal": 424, "pipe2": 59, "pivot_root": 41, "ppoll": 73,
    "pread64": 67, "preadv2": 286, "prlimit64": 261, "process_madvise": 440, "process_mrelease": 448,
    "process_vm_readv": 270, "process_vm_writev": 271, "pselect6": 72, "ptrace": 117, "pwrite64": 68, "quotactl": 60,
    "quotactl_fd": 443,
    "read": 63, "readlinkat": 78, "readv": 65, "reboot": 142, "recvfrom": 207, "recvmsg": 212, "request_key": 218,
    "restart_syscall": 128, "rseq": 293, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139,
    "sched_getaffinity": 123, "sched_setattr": 274, "sched_setparam": 118, "sched_setscheduler": 119,
    "sched_yield": 124, "seccomp": 277, "semget": 190, "semop": 193, "semtimedop": 192, "sendmmsg": 269,
    "sendmsg": 211, "sendto": 206, "set_mempolicy": 237, "set_mempolicy_home_node": 450, "set_robust_list": 99,
    "set_tid_address": 96, "setdomainname": 162, "sethostname": 161, "setitimer": 103, "setns": 268,
    "setpriority": 140, "settimeofday": 170, "shmat": 196, "shmget": 194, "shutdown": 210, "sigaltstack": 132,
    "socket": 198, "socketpair": 199, "statmount": 457, "statx": 291, "swapoff": 225, "swapon": 224, "sysinfo": 179,
    "syslog": 116, "tgkill": 131, "times": 153, "umask": 166, "umount2": 39, "uname": 160, "unshare": 97,
    "userfaultfd": 282, "vhangup": 58, "vmsplice": 75, "wait4": 260, "waitid": 95, "write": 64, "writev": 66,
}  # fmt: skip

_TABLES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}  # audit architecture, numbers


def machine_table() -> tuple[int, dict[str, int]]:
    """Return this machine's audit architecture and its system call numbers by name. Raises HostError if unknown."""
    try:
        return _TABLES[platform.machine()]
    except KeyError:
        raise HostError(
            f"the sandbox does not support the architecture {platform.machine()!r}: use x86_64 or aarch64"
        ) from None
