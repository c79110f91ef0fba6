"""A Ray cluster of several nodes on this machine, started and ended by a process of its own.

Ray forks to start a node, which is unsafe in a process that uses JAX. So a child process, which does not use JAX, does it. It
obeys one line of JSON at a time: the arguments of a node to add, or the id of a node to kill. When its input ends, it ends the
cluster.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

_NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
_END_S = 60.0


class LocalCluster:
    """A cluster; `head` are arguments of its head node, `env` are variables of the environment of all its processes.

    Attributes:
        address: of the head node.
        nodes: the ids of the other nodes.
    """

    def __init__(self, head: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-u", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.nodes: list[str] = []
        self.address = self._ask({**_NODE, **(head or {})})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def add(self, *, cwd: str = ".", **node: Any) -> str:
        """Add a node, whose processes have the folder `cwd`. Returns its id."""
        id = self._ask({**_NODE, **node, "cwd": os.path.abspath(cwd)})
        self.nodes.append(id)
        return id

    def kill(self, id: str) -> None:
        """Kill all processes of a node; `head` is the head node."""
        if id in self.nodes:
            self.nodes.remove(id)
        self._ask(id)

    def close(self) -> None:
        """End the cluster."""
        assert self._child.stdin is not None and self._child.stdout is not None  # both are pipes
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.wait(_END_S)
        self._child.stdout.close()

    def _ask(self, what: Any) -> str:
        assert self._child.stdin is not None and self._child.stdout is not None  # both are pipes
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline().strip()
        if not answer:
            raise RuntimeError(f"the process of the cluster ended: {self._child.wait()}")
        return answer


def _serve() -> None:
    """Obey what comes from stdin. The answer is an address or an id."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(initialize_head=True, head_node_args=json.loads(sys.stdin.readline()))
    nodes: dict[str, Any] = {"head": cluster.head_node}
    print(cluster.address, file=answers)
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            if isinstance(asked, str):
                node = nodes.pop(asked)
                if asked == "head":
                    node.kill_all_processes(check_alive=False, allow_graceful=False)
                else:
                    cluster.remove_node(node, allow_graceful=False)
                print(asked, file=answers)
                continue
            os.chdir(asked.pop("cwd"))
            node = cluster.add_node(**asked)
            nodes[node.node_id] = node
            print(node.node_id, file=answers)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    _serve()
