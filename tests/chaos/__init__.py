"""Chaos tests: real processes under load, faults of every kind, and a history judged by named checkers.

`python -m tests.chaos` plays the long form (`make chaos`), and `test_chaos.py` a short one.

* `world`: the suite with two replicas of each service, and shared state.
* `people`, `front_ends`, `watchers`: the load. `caller` repeats each request until it is answered.
* `tools`, `effects`: tools that record every effect as a line in a file, which no crash can undo.
* `faults`, `model_faults`, `clocks`: the faults, in phases.
* `history`: what clients did and saw. `record`: the history, the ledger as read by the public API, and the effects.
* `logs`: what the logs of the processes must not contain, including requests that the strict model refused.
* `checkers`: what must hold of a record; `mutants` proves with a `story` that each of them can fail.
* `play`, `report`: a whole game, and its report.
"""
