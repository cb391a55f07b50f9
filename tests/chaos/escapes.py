"""Programs that a hostile policy might write. Each gets something that it must not have, or raises.

`run`, `key`, `library`, `outside`, `pid`, `victim`, `port`, `name` and `nr` are written in: what lies, runs and listens
outside, and the numbers of system calls.
"""

from __future__ import annotations

import os

# x86-64, arm64: calls that the sandbox does not know, because it refuses them
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "bpf": (321, 280),
    "capget": (125, 90),
    "execveat": (322, 281),
    "fork": (57, None),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "landlock_create_ruleset": (444, 444),
    "listmount": (458, 458),
    "memfd_create": (319, 279),
    "mq_open": (240, 180),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "pidfd_open": (434, 434),
    "process_vm_readv": (310, 270),
    "readahead": (187, 213),
    "rt_sigqueueinfo": (129, 138),
    "sendmmsg": (307, 269),
    "timer_create": (222, 107),
    "userfaultfd": (323, 282),
    "vfork": (58, None),
    "vmsplice": (278, 75),
}
# and some that it does know
KNOWN: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "close_range": (436, 436),
    "futex": (202, 98),
    "openat2": (437, 437),
    "pipe2": (293, 59),
}
ARM = os.uname().machine == "aarch64"
NR = {name: numbers[ARM] for name, numbers in (NUMBERS | KNOWN).items()}

# straight to the kernel, past Python
CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def must(result):
    if result < 0: raise OSError(ctypes.get_errno(), 'refused')
    return result
def call(number, *words):
    if number is None: raise OSError('this processor has no such call')
    return must(libc.syscall(number, *[ctypes.c_long(word) if isinstance(word, int) else word for word in words]))
"""
PAIR = "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
PIPE = "import fcntl, os, signal, struct\nr, w = os.pipe()\n"
KILL = "fcntl.fcntl(r, fcntl.F_SETSIG, signal.SIGKILL)\nfcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')\n"
LIBRARY = "import fcntl, os\nfd = os.open('{library}', os.O_RDONLY)\n"

ESCAPES = {
    "use files of whoever started it": "import os\nopened = 0\n"  # first, while none of its own are open
    "for fd in range(3, 64):\n"
    "    try: os.fstat(fd); opened += 1\n"
    "    except OSError: pass\n"
    "if not opened: raise OSError('none')",
    # files of others
    "read the passwords": "open('/etc/shadow').read()",
    "read the users": "open('/etc/passwd').read()",
    "read run.db": "open('{run}/run.db', 'rb').read()",
    "list the run's folder": "import os\nos.listdir('{run}')",
    "read a key": "open('{key}').read()",
    "read a key the long way": "open('/box/../../..{key}').read()",
    "read a key through a link": "import os\nos.symlink('{key}', 'k1')\nopen('k1').read()",
    "read a key through a hard link": "import os\nos.link('{key}', 'k2')\nopen('k2').read()",
    "move a key here": "import os\nos.rename('{key}', 'k3')\nopen('k3').read()",
    "list the homes": "import os\nos.listdir('/home')",
    "write outside": "open('{outside}/mark', 'w').write('x')",
    "write to /tmp": "open('/tmp/tailrace-escape-mark', 'w').write('x')",
    "write at the root": "open('/mark', 'w').write('x')",
    "make a temporary file outside": "import os\nos.open('{outside}', os.O_TMPFILE | os.O_RDWR)",
    "remove run.db": "import os\nos.remove('{run}/run.db')",
    "open run.db to all": "import os\nos.chmod('{run}/run.db', 0o777)",
    "touch run.db": "import os\nos.utime('{run}/run.db', (0, 0))",
    "mark run.db": "import os\nos.setxattr('{run}/run.db', 'user.mark', b'x')",
    "read the marks of run.db": "import os\nos.listxattr('{run}/run.db')",
    "name run.db by a handle": CALL
    + "call({nr[name_to_handle_at]}, -100, b'{run}/run.db', (ctypes.c_int * 34)(128), ctypes.byref(ctypes.c_int()), 0)",
    "write into the interpreter's library": "import json\nopen(json.__file__, 'a').write('\\n')",
    "write a module into site-packages": "import numpy, os\n"
    "open(os.path.dirname(os.path.dirname(numpy.__file__)) + '/escape.py', 'w').write('x')",
    "write bytecode": "import json, os\nopen(os.path.dirname(json.__file__) + '/__pycache__/x.pyc', 'wb').write(b'x')",
    # cutting them
    "cut run.db": "import os\nos.truncate('{run}/run.db', 0)",
    "cut run.db by making it anew": CALL + "must(libc.creat(b'{run}/run.db', 0o600))",
    "cut run.db as it is opened": "import os\nos.open('{run}/run.db', os.O_RDONLY | os.O_TRUNC)",
    "cut run.db neither reading nor writing": "import os\nos.open('{run}/run.db', 3 | os.O_TRUNC)",
    "cut run.db by openat2": CALL
    + "call({nr[openat2]}, -100, b'{run}/run.db', (ctypes.c_uint64 * 3)(3 | os.O_TRUNC), 24)",
    "have run.db open for neither": "import os\nos.open('{run}/run.db', 3)",
    "cut a module as it is opened": "import os\nos.open('{library}', os.O_RDONLY | os.O_TRUNC)",
    "cut a module neither reading nor writing": "import os\nos.open('{library}', 3 | os.O_TRUNC)",
    "cut a module": "import os\nos.truncate('{library}', 0)",
    # getting in the way of those who use them
    "lease a module": LIBRARY + "fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "watch a folder": "import fcntl, os\nfcntl.fcntl(os.open('.', os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS)",
    "watch files": CALL + "must(libc.inotify_init())",
    "forget a module's pages": LIBRARY + "os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)",
    "fill the page cache": LIBRARY + CALL + "call({nr[readahead]}, fd, 0, 1)",
    # devices and the kernel's own files
    "read the disk": "open('/dev/vda', 'rb').read(1)",
    "read the memory": "open('/dev/mem', 'rb').read(1)",
    "read the log": "open('/dev/kmsg', 'rb').read(1)",
    "use shared memory": "open('/dev/shm/mark', 'w').write('x')",
    "use the terminal": "open('/dev/tty', 'w').write('x')",
    "make a device": "import os, stat\nos.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))",
    "ask a device": "import fcntl, struct\nfcntl.ioctl(open('/dev/random'), 0x80045200, struct.pack('i', 0))",
    "set the kernel's settings": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh')",
    "read the control groups": "import os\nos.listdir('/sys/fs/cgroup')",
    # other processes
    "read the environment of process 1": "open('/proc/1/environ', 'rb').read()",
    "read the parent's environment": "open('/proc/{pid}/environ', 'rb').read()",
    "read the parent's memory": "open('/proc/{pid}/mem', 'rb').read(1)",
    "list the parent's files": "import os\nos.listdir('/proc/{pid}/fd')",
    "leave through the parent's root": "import os\nos.listdir(os.path.join('/proc/{pid}', 'root', 'etc'))",
    "see where the parent works": "import os\nos.readlink('/proc/{pid}/cwd')",
    "kill the parent": "import os\nos.kill({pid}, 0)",
    "kill whoever started it": "import os\nos.kill(os.getppid() or 1, 0)",
    "kill everybody": "import os\nos.kill(-1, 0)",
    "kill its group": "import os\nos.killpg(0, 0)",
    "queue a signal": CALL + "call({nr[rt_sigqueueinfo]}, {pid}, 0, (ctypes.c_int * 32)(0, 0, -1))",
    "trace the parent": CALL + "must(libc.ptrace(16, {pid}, 0, 0))",
    "be traced": CALL + "must(libc.ptrace(0, 0, 0, 0))",
    "read the parent by process_vm_readv": CALL + "call({nr[process_vm_readv]}, {pid}, 0, 0, 0, 0, 0)",
    "take a file of the parent": CALL + "call({nr[pidfd_open]}, {pid}, 0)",
    "slow the parent down": "import os\nos.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    "limit the parent": "import resource\nresource.prlimit({pid}, resource.RLIMIT_NOFILE, (3, 3))",
    "pin the parent": "import os\nos.sched_setaffinity({pid}, {{0}})",
    "see where the parent runs": "import os\nos.sched_getaffinity({pid})",
    "see the parent's priority": "import os\nos.getpriority(os.PRIO_PROCESS, {pid})",
    "see the parent's session": "import os\nos.getsid({pid})",
    "see the parent's group": "import os\nos.getpgid({pid})",
    "see the parent's capabilities": CALL
    + "call({nr[capget]}, (ctypes.c_uint32 * 2)(0x20080522, {pid}), (ctypes.c_uint32 * 6)())",
    "see what the parent computes": "import time\ntime.clock_gettime(~{pid} << 3)",
    "see what its supervisor computes": "import os, time\ntime.clock_gettime(~os.getppid() << 3)",
    "lend priority to another thread": CALL + "call({nr[futex]}, ctypes.byref(ctypes.c_uint(0)), 6, 0, 0, 0, 0)",
    # signals that the kernel sends for it
    "have the owner of a pipe killed": PIPE + "fcntl.fcntl(r, fcntl.F_SETOWN, {victim})\n" + KILL,
    "have the extended owner of a pipe killed": PIPE + "fcntl.fcntl(r, 15, struct.pack('ii', 1, {victim}))\n" + KILL,
    "have the owner of a socket killed": "import fcntl, os, signal, socket, struct\n"
    "r, w = socket.socketpair()\nfcntl.ioctl(r, 0x8901, struct.pack('i', {victim}))\nw, r = w.fileno(), r.fileno()\n"
    + KILL,
    "have the group of a socket": "import fcntl, socket, struct\n"
    "fcntl.ioctl(socket.socketpair()[0], 0x8902, struct.pack('i', {victim}))",
    "be the owner of a pipe": PIPE + "fcntl.fcntl(r, fcntl.F_SETOWN, os.getpid())",
    "choose a signal": PIPE + "fcntl.fcntl(r, fcntl.F_SETSIG, signal.SIGKILL)",
    "be told of input by fcntl": PIPE + "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)",
    "be told of input by ioctl": PIPE + "fcntl.ioctl(r, 0x5452, struct.pack('i', 1))",
    # other programs, and surviving
    "fork": "import os\nos.fork() or os._exit(0)",
    "fork past Python": CALL + "call({nr[fork]})",
    "vfork": CALL + "call({nr[vfork]})",
    "start a process by clone": CALL + "call({nr[clone]}, 17, 0, 0, 0, 0) or os._exit(0)",
    "start a process by clone3": CALL + "call({nr[clone3]}, (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17), 88) or os._exit(0)",
    "start a thread with files of its own": CALL + "stack = ctypes.create_string_buffer(1 << 16)\n"
    "must(libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), ctypes.c_void_p(ctypes.addressof(stack) + 65472), "
    "0x10B00, None))",
    "start a daemon": "import os\nos.setsid()\nos.fork() or os.fork() or open('{outside}/mark', 'w')",
    "start a shell": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
    "start a program": "import subprocess\nsubprocess.run(['true'])",
    "start a program from a descriptor": CALL + "call({nr[execveat]}, os.open('/lib', os.O_PATH), b'', 0, 0, 0x1000)",
    "become root by su": "import os\nos.execv('/bin/su', ['su'])",
    "become root": "import os\nos.setuid(0)\nopen('/etc/shadow').read()",
    "start a program from memory": CALL + "call({nr[memfd_create]}, b'x', 0)",
    "leave shared memory behind": CALL + "libc.shmctl(must(libc.shmget(1234, 4096, 0o1600)), 0, None)",
    "leave a semaphore behind": CALL + "libc.semctl(must(libc.semget(1234, 1, 0o1600)), 0, 0)",
    "leave a message queue behind": CALL + "libc.msgctl(must(libc.msgget(1234, 0o1600)), 0, None)",
    "leave a named message queue behind": CALL + "call({nr[mq_open]}, b'tailrace-escape', 0o102, 0o600, 0)",
    "outlive its starter": CALL + "must(libc.prctl(1, 0, 0, 0, 0))",
    "be dumped": CALL + "must(libc.prctl(4, 1, 0, 0, 0))",
    "leave a core": CALL + "must(libc.prctl(3, 0, 0, 0, 0) - 1)",
    "adopt orphans": CALL + "must(libc.prctl(36, 1, 0, 0, 0))",
    # the network
    "connect": "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)",
    "connect to the world": "import socket\nsocket.create_connection(('1.1.1.1', 80), timeout=1)",
    "listen": "import socket\nsocket.create_server(('127.0.0.1', 0))",
    "send a datagram": "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "ask for a name": "import socket\nsocket.getaddrinfo('example.com', 80)",
    "connect to an abstract socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{name}')",
    "connect to a socket file": "import socket\nsocket.socket(socket.AF_UNIX).connect('{run}/socket')",
    "talk to the kernel by netlink": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "read raw packets": "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "talk to the host by vsock": "import socket\nsocket.socket(40, socket.SOCK_STREAM)",
    # sockets outside, from a pair of its own
    "have a pair of datagram sockets": PAIR,
    "send from a pair to a socket file": PAIR + "a.sendto(b'x', '{run}/datagrams')",
    "send from a pair to an abstract socket": PAIR + "a.sendto(b'x', '\\0{name}-datagrams')",
    "send a message from a pair to a socket file": PAIR + "a.sendmsg([b'x'], [], 0, '{run}/datagrams')",
    "send messages from a pair to a socket file": PAIR
    + CALL
    + "name = (1).to_bytes(2, 'little') + b'{run}/datagrams'\n"
    "text = ctypes.create_string_buffer(b'x')\n"
    "piece = (ctypes.c_uint64 * 2)(ctypes.addressof(text), 1)\n"
    "buffer = ctypes.create_string_buffer(name)\n"
    "head = (ctypes.c_uint64 * 8)(ctypes.addressof(buffer), len(name), ctypes.addressof(piece), 1)\n"
    "call({nr[sendmmsg]}, a.fileno(), head, 1, 0)",
    "connect a pair to a socket file": PAIR + "a.connect('{run}/datagrams')\na.send(b'x')",
    "connect a pair to an abstract socket": PAIR + "a.connect('\\0{name}-datagrams')\na.send(b'x')",
    "give a pair a name": PAIR + "a.bind('\\0{name}-inside')",
    "keep files in a socket": "import array, socket\na, b = socket.socketpair()\n"
    "a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))])",
    "load a packet filter": "import ctypes, socket, struct\n"
    "word = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0))\n"
    "socket.socketpair()[0].setsockopt(1, 26, struct.pack('HxxxxxxQ', 1, ctypes.addressof(word)))",
    # other views of the machine
    "chroot": "import os\nos.chroot('/')",
    "mount": CALL + "must(libc.mount(b'none', b'/box', b'tmpfs', 0, None))",
    "mount over the root": CALL + "must(libc.mount(None, b'/', None, 32, None))",
    "unmount": CALL + "must(libc.umount2(b'/box', 2))",
    "list the mounts": CALL + "call({nr[listmount]}, (ctypes.c_uint64 * 4)(32, -1), (ctypes.c_uint64 * 8)(), 8, 0)",
    "make a user namespace": CALL + "must(libc.unshare(0x10000000))",
    "make a mount namespace": CALL + "must(libc.unshare(0x20000))",
    "have files of its own": CALL + "must(libc.unshare(0x400))",
    "have files of its own by close_range": CALL + "call({nr[close_range]}, 60, 60, 2)",
    "clone into a user namespace": CALL + "call({nr[clone]}, 0x10000011, 0, 0, 0, 0)",
    "enter a namespace": CALL + "must(libc.setns(0, 0))",
    "open by handle": CALL + "call({nr[open_by_handle_at]}, -100, (ctypes.c_char * 32)(), 0)",
    # the kernel's wide doors
    "load a BPF program": CALL + "call({nr[bpf]}, 0, (ctypes.c_char * 128)(), 128)",
    "use io_uring": CALL + "call({nr[io_uring_setup]}, 1, (ctypes.c_char * 128)())",
    "use the keyring": CALL + "call({nr[keyctl]}, 0, -3, 0, 0, 0)",
    "watch performance": CALL + "call({nr[perf_event_open]}, (ctypes.c_char * 128)(), 0, -1, -1, 0)",
    "handle page faults": CALL + "call({nr[userfaultfd]}, 1)",
    "put up a filter of its own": CALL + "word = (ctypes.c_uint64 * 1)(0x7fff000000000006)\n"
    "must(libc.prctl(22, 2, (ctypes.c_uint64 * 2)(1, ctypes.addressof(word)), 0, 0))",
    "ask for Landlock": CALL + "call({nr[landlock_create_ruleset]}, 0, 0, 1)",
    "have a pipe of notifications": CALL + "call({nr[pipe2]}, (ctypes.c_int * 2)(), 0x80)",
    "make system calls under other numbers": CALL + "call(0x40000000 + 39)",
    "make system calls that are too new": CALL + "call(470, 0, 0, 0)",
    "set the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0.0)",
    "restart the machine": CALL + "must(libc.reboot(0))",
    # more than its share
    "have more memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "use up asynchronous I/O": CALL + "call({nr[io_setup]}, 60000, ctypes.byref(ctypes.c_ulong()))",
    "have a timer": CALL + "call({nr[timer_create]}, 1, 0, ctypes.byref(ctypes.c_int()))",
    "lock memory": CALL + "page = ctypes.create_string_buffer(1)\nmust(libc.mlock(page, 1))",
    "have a larger pipe": PIPE + "fcntl.fcntl(r, 1031, 1 << 20)",
    "keep memory in a pipe": PIPE + CALL + "text = ctypes.create_string_buffer(b'x')\n"
    "call({nr[vmsplice]}, w, (ctypes.c_uint64 * 2)(ctypes.addressof(text), 1), 1, 0)",
    "share equal memory with others": CALL + "import mmap\nm = mmap.mmap(-1, 4096)\nm.madvise(12)",
}
# Those that do no harm when they succeed, and so can be tried without walls.
HARMLESS = {
    *("read the users", "read run.db", "list the run's folder", "read a key", "read a key through a link"),
    *("write outside", "read the parent's environment", "list the parent's files", "kill the parent", "fork"),
    *("see where the parent works", "see the parent's capabilities", "fill the page cache"),
    *("start a program", "connect", "listen", "connect to an abstract socket", "connect to a socket file"),
    *("watch files", "leave shared memory behind", "outlive its starter", "adopt orphans", "leave a core"),
    *("have run.db open for neither", "lease a module", "watch a folder", "forget a module's pages"),
    *("see where the parent runs", "see the parent's priority", "see the parent's session", "see the parent's group"),
    *("see what the parent computes", "lend priority to another thread", "be the owner of a pipe", "choose a signal"),
    *("be told of input by fcntl", "be told of input by ioctl", "have a pair of datagram sockets"),
    *("send from a pair to a socket file", "send from a pair to an abstract socket", "give a pair a name"),
    *("send a message from a pair to a socket file", "send messages from a pair to a socket file"),
    *("connect a pair to a socket file", "connect a pair to an abstract socket", "keep files in a socket"),
    *("load a packet filter", "put up a filter of its own", "ask for Landlock", "lock memory", "have a larger pipe"),
    *("use up asynchronous I/O", "have a timer", "keep memory in a pipe", "have files of its own by close_range"),
    *("read the marks of run.db", "ask a device", "start a thread with files of its own", "queue a signal"),
}
