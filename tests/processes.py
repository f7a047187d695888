"""Processes: two that form one run, and a limit of this one."""

import contextlib
import os
import resource
import signal
import socket
import subprocess


@contextlib.contextmanager
def two_processes(command: list[str], environment=os.environ):
    """Starts a command twice, as two processes of one run. Kills processes that remain."""
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        address = f"localhost:{sock.getsockname()[1]}"
    plain = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    both = [
        subprocess.Popen(command, env=environment | plain | {"JAX_PROCESS_ID": rank}, **output)
        for rank in "01"
    ]
    try:
        yield both
    finally:
        for process in both:
            process.kill()


@contextlib.contextmanager
def file_size_limit(size: int):
    """Limits the size of files: like a full disk, but needs no privileges."""
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
