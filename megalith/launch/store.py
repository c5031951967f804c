"""Process that serves the rendezvous store of a job with restarts in place: the store survives the
loss of any rank. The launcher, which imports no torch, starts it."""

import signal
import sys
import time
from collections.abc import Sequence

from megalith.launch.launcher import SIGNALS, die_with_parent


def main(arguments: Sequence[str]) -> None:
    """Serve the store at the listening socket whose file descriptor is given, until the launcher,
    whose process id is given, ends."""
    listener, parent = map(int, arguments)
    die_with_parent(parent)
    for number in (*SIGNALS, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the ranks save and stop first
    from torch._C._distributed_c10d import TCPStore

    # bound to a name: the server ends with the object
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, master_listen_fd=listener)
    while store.port:
        time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1:])
