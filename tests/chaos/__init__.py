"""Chaos tests: real processes under load, faults of every kind, and a history that named checkers judge.

`python -m tests.chaos` runs the long form (`make chaos`), and `test_chaos.py` a short one.

* `world`: the suite with two replicas of each service, and shared state.
* `people`, `front_ends`, `watchers`: the load. `caller` repeats each request until it is answered.
* `tools`, `effects`: tools that record every effect as a line in a file, which no crash can undo.
* `faults`, `clocks`: the faults, in phases.
* `history`: what clients did and saw, and what the logs of the processes must not contain.
* `record`: the history, the ledger as read by the public API, and the effects.
* `checkers`: what must be true of a record. `mutants` changes the record in `story` to prove that each can fail.
* `play`, `report`: one complete test (a game), and its report.
"""
