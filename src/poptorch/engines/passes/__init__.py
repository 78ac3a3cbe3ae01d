"""Host passes: functions from graph to graph that make a program fast on this machine.

Each engine has one list of them: `eager.py` and `native.py`.
"""
