"""Runs a step under a plan and as plain `jax.jit` on the same arguments, and says whether the results agree.

report.py       the records of a report, their JSON, and the text for people
differences.py  computes how far two results are from each other, and judges whether rounding explains it
ways.py         runs the step in one way, under a plan or as plain jit, on copies of what is donated
check.py        makes the report: `tensile_jax.check`
"""
