"""The runs for a machine that has a GPU for a short time; `python -m benchmarks.gpu` lists them.

    results   do 200 steps give plain jit's results, and do copies run beside kernels?        `make gpu-results`
    times     which way of launching is the fastest, with and without CUDA graphs?            `make gpu-times`
    peaks     does XLA's allocator have in use what plans say?                                `make gpu-peaks`

A run measures its rows in order of importance, each in processes of its own. It adds each row to a JSON file as soon as it is
measured, leaves out the rows that the file has already, and ends after `--seconds`. With `--small`, everything has a small size,
and a CPU is enough: that shows that a run works, and measures nothing of interest.
"""
