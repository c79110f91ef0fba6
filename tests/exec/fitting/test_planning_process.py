"""The process that plans in the background ends with the process that trains."""

import os
import signal
import subprocess
import sys
import time

_SCRIPT = """
import time
import tensile_jax.exec.fitting.planning_process as p
started = p.subprocess.Popen
def popen(*args, **kwargs):
    process = started(*args, **kwargs)
    print(process.pid, flush=True)
    return process
p.subprocess.Popen = popen
with p.PlanningProcess() as planning:
    planning.call(time.sleep, 60)
"""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_it_ends_if_the_training_process_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _SCRIPT], stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        planning = int(training.stdout.readline())
        time.sleep(3)  # so that it computes
        assert _alive(planning) and os.getpriority(os.PRIO_PROCESS, planning) == 19
        training.send_signal(signal.SIGKILL)
    began = time.monotonic()
    while _alive(planning):
        assert time.monotonic() - began < 10, "it goes on without the process that asked for a plan"
        time.sleep(0.1)
