"""Damaged files, thousands of them: each gives an error of plait's own or a right answer, whatever is wrong with it.

    python -m tests.fuzz                     # 2,000 of every kind (`make fuzz`)
    python -m tests.fuzz --count 50 config   # some of one
    python -m tests.fuzz --case 1234 config  # one again, with its traceback

`mutations` damages, `kinds` says what is damaged and what is done with it, `sweep` runs it in a child process under
limits of time and memory.
"""
