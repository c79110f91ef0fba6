"""Runs one job in a process of its own: what is sent to the process, how both processes communicate, and how each may end.

the runtime's process                                             the job's own process
isolated_actor.py (the runtime's calls)
job_process.py (starts it, notices its death) <--channel.py--> child.py (main program, ends with its parent)
"""
