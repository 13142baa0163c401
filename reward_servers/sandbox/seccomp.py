"""Compiles the policy's system calls to classic BPF programs that inspect ``struct seccomp_data``."""

import errno
import struct
from collections.abc import Iterable

from reward_servers.sandbox import policy
from reward_servers.sandbox.syscalls import machine_table

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

_LOAD, _RETURN = 0x20, 0x06
_EQUAL, _AT_LEAST, _BITS_SET, _MASK = 0x15, 0x35, 0x45, 0x54
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16
_X32_BIT = 0x40000000
_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def deny_filter() -> bytes:
    """Return a filter that allows all but ``policy.DENIED_SYSCALLS``, for use inside namespaces."""
    arch, number = machine_table()
    denied = [number[name] for name in policy.DENIED_SYSCALLS if name in number]
    body = [instruction for nr in denied for instruction in _on_number(nr, [(_RETURN, 0, 0, EPERM)])]
    bounded_clone = [*_if_bits(0, policy.NAMESPACE_FLAGS | policy.CLONE_PARENT, EPERM), (_RETURN, 0, 0, ALLOW)]
    body += _on_number(number["clone"], bounded_clone)
    unknown = [(_AT_LEAST, 0, 1, policy.FIRST_UNKNOWN_SYSCALL), (_RETURN, 0, 0, ENOSYS)]
    return _encode([*_prologue(arch), *unknown, *_shared_rules(number), *body, (_RETURN, 0, 0, ALLOW)])


def allow_filter() -> bytes:
    """Return a filter that denies all but ``policy.ALLOWED_SYSCALLS`` and new threads, for use without namespaces."""
    arch, number = machine_table()
    threads_only = [*_if_bits(0, policy.CLONE_THREAD, ALLOW), (_RETURN, 0, 0, EPERM)]
    body = _on_number(number["clone"], threads_only)
    for name in policy.ALLOWED_SYSCALLS:
        if name in number:
            body += _on_number(number[name], [(_RETURN, 0, 0, ALLOW)])
    return _encode([*_prologue(arch), *_shared_rules(number), *body, (_RETURN, 0, 0, EPERM)])


def _prologue(arch: int) -> list[_Instruction]:
    """Kill the process if it uses another architecture (``int 0x80``, x32), where the numbers mean other calls."""
    return [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, KILL),
    ]


def _shared_rules(number: dict[str, int]) -> list[_Instruction]:
    """Return the rules, common to both filters, that depend on an argument."""
    rules = _on_number(number["clone3"], [(_RETURN, 0, 0, ENOSYS)])  # its flags are out of reach; libc then uses clone
    rules += _on_number(number["socketpair"], _only_unix_streams())
    rules += _on_number(number["sendto"], _only_if_null(4))  # no address: only to the other end of a socketpair
    rules += _on_number(number["prlimit64"], _only_if(0, 0))  # only for the calling process
    rules += _on_number(number["mmap"], [*_if_bits(3, policy.MAP_HUGETLB, EPERM), (_RETURN, 0, 0, ALLOW)])
    rules += _on_number(number["preadv2"], _only_if(5, 0))  # a flag would tell whether a shared file is cached
    for name, forbidden in (("ioctl", policy.FORBIDDEN_IOCTLS), ("fcntl", policy.FORBIDDEN_FCNTLS)):
        requests = [pair for request in forbidden for pair in _if_equal(1, request, EPERM)]
        rules += _on_number(number[name], [*requests, (_RETURN, 0, 0, ALLOW)])
    return rules


def _on_number(number: int, then: list[_Instruction]) -> list[_Instruction]:
    return [(_EQUAL, 0, len(then), number), *then]


def _argument(index: int) -> _Instruction:
    return (_LOAD, 0, 0, _ARGS_AT + 8 * index)  # the low half; the arguments checked have 32 bits


def _only_if(index: int, value: int) -> list[_Instruction]:
    return [_argument(index), (_EQUAL, 0, 1, value), (_RETURN, 0, 0, ALLOW), (_RETURN, 0, 0, EPERM)]


def _only_unix_streams() -> list[_Instruction]:
    """Allow only AF_UNIX stream sockets; datagram sockets could send to any path."""
    family = [_argument(0), (_EQUAL, 1, 0, policy.AF_UNIX), (_RETURN, 0, 0, EPERM)]
    kind = [_argument(1), (_MASK, 0, 0, policy.SOCK_TYPE_MASK), (_EQUAL, 0, 1, policy.SOCK_STREAM)]
    return [*family, *kind, (_RETURN, 0, 0, ALLOW), (_RETURN, 0, 0, EPERM)]


def _only_if_null(index: int) -> list[_Instruction]:
    """Allow the call only if both halves of a pointer argument are zero."""
    low, high = _ARGS_AT + 8 * index, _ARGS_AT + 8 * index + 4
    halves = [(_LOAD, 0, 0, low), (_EQUAL, 0, 3, 0), (_LOAD, 0, 0, high), (_EQUAL, 0, 1, 0)]
    return [*halves, (_RETURN, 0, 0, ALLOW), (_RETURN, 0, 0, EPERM)]


def _if_equal(index: int, value: int, then: int) -> list[_Instruction]:
    return [_argument(index), (_EQUAL, 0, 1, value), (_RETURN, 0, 0, then)]


def _if_bits(index: int, mask: int, then: int) -> list[_Instruction]:
    return [_argument(index), (_BITS_SET, 0, 1, mask), (_RETURN, 0, 0, then)]


def _encode(program: Iterable[_Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
