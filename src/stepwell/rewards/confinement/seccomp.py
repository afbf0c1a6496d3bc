"""The system calls that a sandbox refuses, as a BPF program for `bwrap --seccomp`.

A namespace hides the network, processes and files; the filter closes doors in the kernel that namespaces leave open:
new namespaces and mounts, debugging, key rings, modules, memory outside the limits (System V, memfd), sockets that no
namespace covers (vsock, netlink, packet). Refused calls fail with EPERM. Programs of another architecture are killed.

The program is a list of 8-byte instructions (struct sock_filter), as linux/filter.h and linux/seccomp.h define them.
"""

import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
NUMBER_OFFSET, ARCH_OFFSET, ARGUMENT_OFFSET = 0, 4, 16
X32_BIT = 0x40000000
NAMESPACE_FLAGS = 0x7E020080
"""CLONE_NEWNS, CLONE_NEWCGROUP, …UTS, …IPC, …USER, …PID, …NET, and CLONE_NEWTIME."""
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: of these, the sandbox has its own."""
TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI, TIOCLINUX."""

REFUSED_EVERYWHERE = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "statmount": 457,
    "listmount": 458,
    "open_tree_attr": 467,
}
"""Newer system calls have the same number on all architectures."""
REFUSED_BY_ARCHITECTURE = {
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "mknod": (133, None),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "iopl": (172, None),
    "ioperm": (173, None),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "clock_settime": (227, 112),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mknodat": (259, 33),
    "unshare": (272, 97),
    "vmsplice": (278, 75),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "memfd_create": (319, 279),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
}
"""The numbers on x86_64 and on aarch64; None where there is no such call."""


@dataclass(frozen=True, slots=True)
class Architecture:
    audit: int
    """AUDIT_ARCH_… of linux/audit.h."""
    refused: Sequence[int]
    clone: int
    clone3: int
    socket: int
    ioctl: int
    has_x32: bool = False


REFUSED_X86, REFUSED_ARM = (
    [*REFUSED_EVERYWHERE.values(), *(number for number in numbers if number is not None)]
    for numbers in zip(*REFUSED_BY_ARCHITECTURE.values(), strict=True)
)
ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, REFUSED_X86, clone=56, clone3=435, socket=41, ioctl=16, has_x32=True),
    "aarch64": Architecture(0xC00000B7, REFUSED_ARM, clone=220, clone3=435, socket=198, ioctl=29),
}


def filter_program(machine: str | None = None) -> bytes | None:
    """The filter for this machine; None if its architecture is not known here."""
    arch = ARCHITECTURES.get(machine or platform.machine())
    if arch is None:
        return None
    program = [
        _load(ARCH_OFFSET),
        _jump(EQUAL, arch.audit, then=1, otherwise=0),
        _return(KILL),
        _load(NUMBER_OFFSET),
    ]
    if arch.has_x32:
        program += [_jump(AT_LEAST, X32_BIT, then=0, otherwise=1), _return(KILL)]
    program += _on(arch.clone3, [_return(REFUSE | ENOSYS)])  # its flags are in memory; clone is used instead
    program += _on(arch.clone, [_load(ARGUMENT_OFFSET), *_refuse_if(ANY_BIT, NAMESPACE_FLAGS), _return(ALLOW)])
    families = [_jump(EQUAL, family, then=len(FAMILIES) - place, otherwise=0) for place, family in enumerate(FAMILIES)]
    program += _on(arch.socket, [_load(ARGUMENT_OFFSET), *families, _return(REFUSE | EPERM), _return(ALLOW)])
    program += _on(
        arch.ioctl,
        [
            _load(ARGUMENT_OFFSET + 8),
            *(part for request in TERMINAL_INPUT for part in _refuse_if(EQUAL, request)),
            _return(ALLOW),
        ],
    )
    for number in arch.refused:
        program += _on(number, [_return(REFUSE | EPERM)])
    return b"".join([*program, _return(ALLOW)])


def _load(offset: int) -> bytes:
    return struct.pack("<HBBI", LOAD, 0, 0, offset)


def _return(value: int) -> bytes:
    return struct.pack("<HBBI", RETURN, 0, 0, value)


def _jump(test: int, value: int, *, then: int, otherwise: int) -> bytes:
    """Skips so many instructions."""
    return struct.pack("<HBBI", test, then, otherwise, value)


def _on(number: int, instructions: list[bytes]) -> list[bytes]:
    """The instructions for one system call; its number is loaded."""
    return [_jump(EQUAL, number, then=0, otherwise=len(instructions)), *instructions]


def _refuse_if(test: int, value: int) -> list[bytes]:
    return [_jump(test, value, then=0, otherwise=1), _return(REFUSE | EPERM)]
