"""The policy's system calls as classic BPF programs: loads of ``struct seccomp_data``, compares, returns."""

import errno
import struct
from collections.abc import Iterable

from reward_servers.sandbox import policy
from reward_servers.sandbox.syscalls import machine_table

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

_LOAD, _RETURN = 0x20, 0x06
_EQUAL, _AT_LEAST, _BITS_SET = 0x15, 0x35, 0x45
_NUMBER_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16
_X32_BIT = 0x40000000
_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def deny_filter() -> bytes:
    """Everything but ``policy.DENIED_SYSCALLS`` is allowed: for use inside namespaces."""
    arch, number = machine_table()
    denied = [number[name] for name in policy.DENIED_SYSCALLS if name in number]
    body = [instruction for nr in denied for instruction in _on_number(nr, [(_RETURN, 0, 0, EPERM)])]
    no_namespaces = [*_if_bits(0, policy.NAMESPACE_FLAGS, EPERM), (_RETURN, 0, 0, ALLOW)]
    body += _on_number(number["clone"], no_namespaces)
    return _encode([*_prologue(arch), *_shared_rules(number), *body, (_RETURN, 0, 0, ALLOW)])


def allow_filter() -> bytes:
    """Nothing but ``policy.ALLOWED_SYSCALLS`` and new threads is allowed: for use without namespaces."""
    arch, number = machine_table()
    threads_only = [*_if_bits(0, policy.CLONE_THREAD, ALLOW), (_RETURN, 0, 0, EPERM)]
    body = _on_number(number["clone"], threads_only)
    for name in policy.ALLOWED_SYSCALLS:
        if name in number:
            body += _on_number(number[name], [(_RETURN, 0, 0, ALLOW)])
    return _encode([*_prologue(arch), *_shared_rules(number), *body, (_RETURN, 0, 0, EPERM)])


def _prologue(arch: int) -> list[_Instruction]:
    """Another architecture's numbers (``int 0x80``, x32) mean other calls: the process is killed."""
    return [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, KILL),
    ]


def _shared_rules(number: dict[str, int]) -> list[_Instruction]:
    """Calls that both filters decide by an argument."""
    rules = _on_number(number["clone3"], [(_RETURN, 0, 0, ENOSYS)])  # its flags are out of reach; libc falls back
    rules += _on_number(number["socketpair"], _only_if(0, policy.AF_UNIX))
    rules += _on_number(number["prlimit64"], _only_if(0, 0))  # nobody else's limits
    ioctls = [pair for request in policy.FORBIDDEN_IOCTLS for pair in _if_equal(1, request, EPERM)]
    return rules + _on_number(number["ioctl"], [*ioctls, (_RETURN, 0, 0, ALLOW)])


def _on_number(number: int, then: list[_Instruction]) -> list[_Instruction]:
    return [(_EQUAL, 0, len(then), number), *then]


def _argument(index: int) -> _Instruction:
    return (_LOAD, 0, 0, _ARGS_AT + 8 * index)  # the low half: every argument looked at is 32 bits wide


def _only_if(index: int, value: int) -> list[_Instruction]:
    return [_argument(index), (_EQUAL, 0, 1, value), (_RETURN, 0, 0, ALLOW), (_RETURN, 0, 0, EPERM)]


def _if_equal(index: int, value: int, then: int) -> list[_Instruction]:
    return [_argument(index), (_EQUAL, 0, 1, value), (_RETURN, 0, 0, then)]


def _if_bits(index: int, mask: int, then: int) -> list[_Instruction]:
    return [_argument(index), (_BITS_SET, 0, 1, mask), (_RETURN, 0, 0, then)]


def _encode(program: Iterable[_Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
