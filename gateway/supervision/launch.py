"""What a replica's process does before it becomes the replica: binds its life to its parent's and itself to its cores.

Run as a script, in an interpreter without site-packages: launch.py PARENT_PID CORES COMMAND [ARGUMENT ...], CORES being
comma-separated numbers or "-". The kernel kills the process when the thread that started it ends, whatever ended it; between
the start and that request a parent may die, hence the second look. (Only Linux can do that; elsewhere it is left out.)
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, cores, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            sys.exit("the supervisor has gone")
        if cores != "-":
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
